# gemserve as an image. Two stages, so that compilers and pip's leftovers stay behind.
#
#   VARIANT          cpu (default) or cuda. The CUDA libraries come with torch; the host brings the driver.
#   BASE_IMAGE       any Debian with python3 (3.11 or newer), its venv module and ca-certificates; the same for both stages.
#   EXTRAS           optional parts of gemserve, with commas between: "hub" (default), "hub,ray" for Ray Serve.
#   TORCH_INDEX_URL  where torch's wheels for the variant are, when pip's own index lacks them: the general index has the CUDA
#                    build only, PyTorch's start page names the address of the others.
#
# The root file system may be read-only. /models holds the model, /cache is written to; nothing else is.

ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY constraints.txt ./
RUN python3 -m venv /opt/gemserve

# Torch lies in a folder of its own, which is a layer of its own in the image: by far the largest, and it hardly ever changes.
ARG VARIANT=cpu
ARG TORCH_INDEX_URL=
RUN --mount=type=cache,target=/root/.cache/pip \
    version="$(sed -n 's/^torch==//p' constraints.txt)" \
    && case "${VARIANT}" in \
        cpu) requirement="torch==${version}+cpu" ;; \
        cuda) requirement="torch==${version}" ;; \
        *) echo "VARIANT must be cpu or cuda, not '${VARIANT}'" >&2; exit 1 ;; \
    esac \
    && /opt/gemserve/bin/pip install --no-input --target /opt/torch -c constraints.txt \
        ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} "${requirement}" \
    && /opt/gemserve/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > purelib \
    && echo /opt/torch > "$(cat purelib)/torch-layer.pth"

# What gemserve needs besides, read from its own list, so that a change of the code installs nothing again.
COPY pyproject.toml ./
ARG EXTRAS=hub
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/gemserve/bin/python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = [name for extra in sys.argv[1].split(",") for name in project["optional-dependencies"][extra]]; \
print(*project["dependencies"], *extras, sep="\n")' "${EXTRAS}" > requirements.txt \
    && /opt/gemserve/bin/pip install --no-input -c constraints.txt -r requirements.txt hatchling

COPY README.md LICENSE ./
COPY model model
COPY server server
# The kernels are compiled for every kind of processor that has some; the server picks at start.
RUN /opt/gemserve/bin/pip install --no-input --no-deps --no-build-isolation .
WORKDIR /
RUN /opt/gemserve/bin/python -m model.ops.cpu.build --prebuilt \
    && /opt/gemserve/bin/pip uninstall --yes hatchling

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="gemserve" \
      org.opencontainers.image.description="Serves Google's Gemma 3 text models over an OpenAI-style HTTP API" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 /models /cache
COPY --from=build /opt/torch /opt/torch
COPY --from=build /opt/gemserve /opt/gemserve
COPY deploy/__init__.py /opt/gemserve/applications/deploy/
COPY deploy/ray /opt/gemserve/applications/deploy/ray
# HOME and the caches of libraries lie where something can be written.
ENV PATH=/opt/gemserve/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/gemserve/applications \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/cache \
    HF_HOME=/cache/huggingface \
    GEMSERVE_CACHE=/cache \
    GEMSERVE_HOST=0.0.0.0 \
    GEMSERVE_PORT=8000 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# By number, so that an orchestrator can tell that it isn't root.
USER 10001:10001
WORKDIR /cache
VOLUME ["/models", "/cache"]
EXPOSE 8000
# Loading a large model takes minutes, in which the answer "not ready yet" is no fault.
HEALTHCHECK --interval=10s --timeout=6s --start-period=15m --retries=3 CMD ["gemserve", "health"]
ENTRYPOINT ["/usr/bin/tini", "--", "gemserve"]
CMD ["serve", "/models"]
