# The data plane: model, checkpoint, trainer and engine on layers with PyTorch. One file for CPU and CUDA: the locked
# PyTorch runs on both, the driver comes from the node.
#
#   docker build -f images/runtime.Dockerfile -t runtime .
#
# PYTHON_BASE      any image with Python >= 3.11, its venv module and apt
# SYSTEM_PACKAGES  Triton compiles its launchers with a C compiler when a kernel is first used on a GPU
# KERNEL_ARCHITECTURES, KERNEL_MODELS, KERNEL_TRAININGS  GPUs (90 is sm_90), and models (names of `stoker kernels
#                  build`) whose engine's and trainer's kernels are compiled into the image; no architecture: none are,
#                  and a fresh container compiles them at its start
# UV_OPTIONS       how dependencies are fetched, e.g. --cache-dir of a mounted folder

ARG PYTHON_BASE=docker.io/library/python:3.12-slim

FROM ${PYTHON_BASE} AS code
COPY lock/setup.txt /tools/setup.txt
RUN python3 -m venv /tools && /tools/bin/python -m pip install --quiet --no-cache-dir --require-hashes -r /tools/setup.txt
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY model/stoker model/stoker
COPY trainer/stoker trainer/stoker
COPY engine/stoker/engine engine/stoker/engine
RUN /tools/bin/uv build --quiet --offline --no-cache --wheel --no-build-isolation --python /tools/bin/python --out-dir dist . \
    && python3 -m zipfile --extract dist/*.whl /opt/stoker/app \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/stoker/app

# Changes only with the base and the lock files, so that a change of code never moves gigabytes.
FROM ${PYTHON_BASE} AS dependencies
ARG SYSTEM_PACKAGES="gcc libc6-dev"
RUN if [ -n "${SYSTEM_PACKAGES}" ]; then \
        apt-get update -q && apt-get install -q -y --no-install-recommends ${SYSTEM_PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi
ARG UV_OPTIONS="--no-cache"
COPY images/install-locked.sh lock/setup.txt lock/runtime.txt /opt/stoker/lock/
RUN python3 -m venv --without-pip /opt/stoker \
    && echo /opt/stoker/app > "$(/opt/stoker/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/stoker.pth"
# A layer for each group of large packages: builders and nodes hold the layer they move two or three times.
RUN sh /opt/stoker/lock/install-locked.sh /opt/stoker/lock/runtime.txt '^nvidia-cu(blas|dnn)'
RUN sh /opt/stoker/lock/install-locked.sh /opt/stoker/lock/runtime.txt '^(nvidia|cuda)-'
RUN sh /opt/stoker/lock/install-locked.sh /opt/stoker/lock/runtime.txt '^torch='
RUN sh /opt/stoker/lock/install-locked.sh /opt/stoker/lock/runtime.txt '^triton='
RUN sh /opt/stoker/lock/install-locked.sh /opt/stoker/lock/runtime.txt '.'

FROM dependencies AS runtime
RUN echo 'stoker:x:65532:65532:stoker:/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'stoker:x:65532:' >> /etc/group
COPY --from=code /opt/stoker/app /opt/stoker/app
# Needs no GPU. The folder is the one that engines and ranks look into by themselves.
ARG KERNEL_ARCHITECTURES="90"
ARG KERNEL_MODELS="llama-3.2-1b llama-3.1-8b llama-3.1-70b qwen3-0.6b qwen3-8b qwen3-30b-a3b"
ARG KERNEL_TRAININGS="llama-3.2-1b llama-3.1-8b qwen3-0.6b qwen3-8b qwen3-30b-a3b"
RUN if [ -n "${KERNEL_ARCHITECTURES}" ]; then \
        /opt/stoker/bin/python -m stoker.engine.kernels_main build \
            $(printf -- '--architecture %s ' ${KERNEL_ARCHITECTURES}) ${KERNEL_MODELS:+$(printf -- '--model %s ' ${KERNEL_MODELS})} \
            ${KERNEL_TRAININGS:+$(printf -- '--trainer %s ' ${KERNEL_TRAININGS})}; \
    fi
# Nothing is written below /: a pod mounts /tmp and its work folder.
ENV PATH=/opt/stoker/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=stoker \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
WORKDIR /tmp
LABEL org.opencontainers.image.title="Stoker runtime" \
      org.opencontainers.image.description="Trainer and engine of Stoker" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["python", "-m", "stoker.engine", "--help"]
