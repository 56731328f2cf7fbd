"""What HTTP costs: the OpenAI front against gRPC, on the same server and in the same run."""
