# The image of docs/how-to/deploy.md. The CPU kernels are compiled while its wheels are built, so it needs no compiler.
FROM python:3.12-slim-bookworm AS build
# The compiler's version is that of the base image's Debian.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The kernels are compiled against the JAX that is installed below. pip reads the second variable from 25.3 on.
RUN PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./clients/python .
RUN python -m venv /opt/penstock \
    && /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt /wheels/*.whl

FROM python:3.12-slim-bookworm
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH
RUN useradd --create-home --uid 10001 penstock && install -d -o penstock /var/cache/penstock
# A number, so that Kubernetes can see that it is not root.
USER 10001
VOLUME /var/cache/penstock
EXPOSE 50051
# PENSTOCK_ADDR tells the probe another address. It knows no TLS: such a server has a Unix socket for probes.
HEALTHCHECK --interval=15s --timeout=10s --start-period=10m CMD ["penstock", "health", "--timeout", "5"]
ENTRYPOINT ["penstock", "serve"]
CMD ["demo", "--compilation-cache", "/var/cache/penstock/xla"]
