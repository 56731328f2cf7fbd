"""Runs workloads on an engine: in this process, over gRPC, or in a process beside another one."""
