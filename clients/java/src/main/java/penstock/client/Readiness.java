package penstock.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.stub.ClientCalls;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import penstock.v1.InferenceServiceGrpc;

/** Waits for a server by asking its health service. */
record Readiness(ManagedChannel managed, Channel channel) {
    private static final Duration BETWEEN = Duration.ofMillis(100);
    /** One question: a server that has just started may not have heard it. */
    private static final Duration QUESTION = Duration.ofSeconds(2);

    /** Returns when the server takes requests; throws an UnavailableException when patience is at its end. */
    void await(Duration patience) throws InterruptedException {
        long end = System.nanoTime() + Timeouts.nanos(patience);
        while (true) {
            StatusRuntimeException problem;
            try {
                ServingStatus status = ask(Math.min(end - System.nanoTime(), QUESTION.toNanos()));
                if (status == ServingStatus.SERVING) {
                    return;
                }
                problem = unavailable("the server's health is " + status, null);
            } catch (StatusRuntimeException error) {
                if (managed.isShutdown()) { // nobody opens it again
                    throw PenstockException.from(error);
                }
                problem = unavailable("the server cannot be asked: " + error.getMessage(), error);
            }
            if (System.nanoTime() + BETWEEN.toNanos() >= end) {
                throw PenstockException.from(problem);
            }
            Thread.sleep(BETWEEN.toMillis());
            managed.resetConnectBackoff();
        }
    }

    private ServingStatus ask(long nanos) {
        HealthCheckRequest request = HealthCheckRequest.newBuilder()
                .setService(InferenceServiceGrpc.SERVICE_NAME)
                .build();
        CallOptions options =
                CallOptions.DEFAULT.withWaitForReady().withDeadlineAfter(nanos, TimeUnit.NANOSECONDS);
        return ClientCalls.blockingUnaryCall(channel, HealthGrpc.getCheckMethod(), options, request)
                .getStatus();
    }

    private static StatusRuntimeException unavailable(String why, Throwable cause) {
        return Status.UNAVAILABLE.withDescription(why).withCause(cause).asRuntimeException();
    }
}
