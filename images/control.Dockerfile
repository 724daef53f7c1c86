# The control plane: operator, router, checkpoint tasks and the command line. No PyTorch.
#
#   docker build -f images/control.Dockerfile -t control .
#
# PYTHON_BASE  any image with Python >= 3.11 and its venv module
# UV_OPTIONS   how dependencies are fetched, e.g. --cache-dir of a mounted folder

ARG PYTHON_BASE=docker.io/library/python:3.12-slim

FROM ${PYTHON_BASE} AS code
COPY lock/setup.txt /tools/setup.txt
RUN python3 -m venv /tools && /tools/bin/python -m pip install --quiet --no-cache-dir --require-hashes -r /tools/setup.txt
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY model/stoker/pod model/stoker/pod
COPY model/stoker/checkpoint model/stoker/checkpoint
COPY engine/stoker/router engine/stoker/router
COPY operator/stoker operator/stoker
RUN /tools/bin/uv build --quiet --offline --no-cache --wheel --no-build-isolation --python /tools/bin/python --out-dir dist . \
    && python3 -m zipfile --extract dist/*.whl /opt/stoker/app \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/stoker/app \
    && mkdir /opt/stoker/app/bin \
    && printf '#!/opt/stoker/bin/python\nfrom stoker.cli.main import main\n\nmain()\n' > /opt/stoker/app/bin/stoker \
    && chmod 755 /opt/stoker/app/bin/stoker

# Changes only with the base and the lock files.
FROM ${PYTHON_BASE} AS dependencies
ARG UV_OPTIONS="--no-cache"
COPY images/install-locked.sh lock/setup.txt lock/control.txt /opt/stoker/lock/
RUN python3 -m venv --without-pip /opt/stoker \
    && echo /opt/stoker/app > "$(/opt/stoker/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/stoker.pth"
RUN sh /opt/stoker/lock/install-locked.sh /opt/stoker/lock/control.txt '.'

FROM dependencies AS control
RUN echo 'stoker:x:65532:65532:stoker:/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'stoker:x:65532:' >> /etc/group
COPY --from=code /opt/stoker/app /opt/stoker/app
# Nothing is written below /: a pod mounts /tmp. One arena and an early trim give memory back after a burst (bench/README.md).
ENV PATH=/opt/stoker/bin:/opt/stoker/app/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    MALLOC_ARENA_MAX=1 \
    MALLOC_TRIM_THRESHOLD_=131072 \
    USER=stoker
USER 65532:65532
WORKDIR /tmp
LABEL org.opencontainers.image.title="Stoker control" \
      org.opencontainers.image.description="Operator, router, checkpoint tasks and command line of Stoker" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["stoker", "--help"]
