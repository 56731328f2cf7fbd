"""The gRPC front: servicers, conversion, text and telemetry around the engine."""
