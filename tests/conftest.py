"""What holds for every test: threads that wait sleep instead of spinning, as in the server, set before torch
is imported; and generated examples have no deadline, which a busy machine would miss by chance."""

from hypothesis import HealthCheck, settings

from server.loading.threads import configure_threads

configure_threads()


def pytest_report_header() -> str:
    from tests.model.ops.cpu.instruction_sets import report

    return report()


settings.register_profile("gemserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gemserve")
