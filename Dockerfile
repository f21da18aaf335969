# The server with the embedded model inside: it needs no network to run, no root, and writes nothing but to /tmp.
# `tools/container.sh` builds and runs it on a base made of Debian's packages, where there is no image registry.
ARG BASE=python:3.11-slim
FROM ${BASE} AS build
# PyTorch without CUDA, which is several gigabytes smaller.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
RUN python3 -m venv /opt/usetta
ENV PATH=/opt/usetta/bin:$PATH PIP_NO_CACHE_DIR=1 USETTA_CACHE=/opt/models
COPY constraints.txt ./
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE ./
COPY src ./src
RUN pip install --constraint constraints.txt '.[serve]' && usetta models pull embedded

FROM ${BASE}
COPY --from=build /opt/usetta /opt/usetta
COPY --from=build /opt/models /opt/models
RUN useradd --system --no-create-home usetta
USER usetta
ENV PATH=/opt/usetta/bin:$PATH USETTA_CACHE=/opt/models HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 HOME=/tmp
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=3)"]
ENTRYPOINT ["usetta", "serve", "--host", "0.0.0.0", "--model", "embedded"]
