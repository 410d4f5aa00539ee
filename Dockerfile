# A small image with the `loadgen` command. It runs the simulated servers of docker-compose.yml (profile sim), or a load
# generator next to real servers. It needs no root, and writes only to /tmp.
#
#   docker build -t llm-loadgen:0.1.0 .
#   docker run --rm --read-only --tmpfs /tmp llm-loadgen:0.1.0 burst --server tgi --n 100 --out /tmp/run
#
# For a study, also pin the base image by its digest: --build-arg PYTHON=3.12.8-slim-bookworm@sha256:...

ARG PYTHON=3.12.8-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
RUN python -m venv /opt/loadgen
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Dependencies get a separate layer, so that a change of code does not download them again.
COPY pyproject.toml ./
RUN mkdir workloads servers loadgen analysis && touch README.md LICENSE docker-compose.yml
RUN /opt/loadgen/bin/pip install '.[ui,schema]'
COPY README.md LICENSE docker-compose.yml ./
COPY workloads workloads
COPY servers servers
COPY loadgen loadgen
COPY analysis analysis
RUN /opt/loadgen/bin/pip install --no-deps --force-reinstall .

FROM python:${PYTHON}
COPY --from=build /opt/loadgen /opt/loadgen
# Let this Python open packet sockets and raise its priority if the container may (setcap cap_net_raw,cap_sys_nice+p).
RUN ["python", "-c", "import os, struct; os.setxattr(os.path.realpath('/opt/loadgen/bin/python'), 'security.capability', struct.pack('<5I', 2 << 24, 1 << 13 | 1 << 23, 0, 0, 0))"]
ENV PATH=/opt/loadgen/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["loadgen"]
CMD ["--help"]
