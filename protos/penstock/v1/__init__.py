"""The gRPC contract: generated from the .proto files beside this file by `make proto`."""
