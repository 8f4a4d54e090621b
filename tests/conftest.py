"""What holds for every test: threads that wait sleep instead of spinning, as in the server, set before torch is imported."""

from server.threads import configure_threads

configure_threads()
