# The image of docs/how-to/deploy.md. It compiles the CPU kernels while it is built, so it needs no compiler when it runs.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY . /src
RUN python -m venv /opt/penstock && /opt/penstock/bin/pip install --constraint /src/constraints.txt /src/clients/python /src
RUN /opt/penstock/bin/python -m penstock.runtime.ops.native.build --folder /opt/penstock/native

FROM python:3.12-slim
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH
RUN useradd --create-home --uid 10001 penstock && install -d -o penstock /var/cache/penstock
USER penstock
VOLUME /var/cache/penstock
EXPOSE 50051
ENTRYPOINT ["penstock", "serve"]
CMD ["demo", "--native-folder", "/opt/penstock/native", "--compilation-cache", "/var/cache/penstock/xla"]
