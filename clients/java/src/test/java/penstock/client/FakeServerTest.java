package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.rpc.RetryInfo;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.time.Duration;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import penstock.v1.GenerateRequest;
import penstock.v1.GenerateResponse;
import penstock.v1.InferenceServiceGrpc;
import penstock.v1.Output;
import penstock.v1.OutputDelta;
import penstock.v1.StreamRequest;
import penstock.v1.StreamResponse;

/** What a server of the demo model cannot be brought to: a server written by hand, which fails on demand. */
class FakeServerTest {
    private final AtomicInteger calls = new AtomicInteger();
    private Server server;
    private Status failure;
    private int failures;
    private int retryInSeconds;

    @BeforeEach
    void serve() throws IOException {
        server = Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
                .addService(new Fake())
                .build()
                .start();
    }

    @AfterEach
    void end() {
        server.shutdownNow();
    }

    private ClientBuilder builder() {
        return PenstockClient.builder("127.0.0.1:" + server.getPort());
    }

    /** The failure as Penstock's servers send it, with the time after which the call may be made again. */
    private StatusRuntimeException refusal() {
        RetryInfo again = RetryInfo.newBuilder()
                .setRetryDelay(com.google.protobuf.Duration.newBuilder().setSeconds(retryInSeconds))
                .build();
        Metadata trailers = new Metadata();
        trailers.put(
                Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER),
                String.valueOf(1000 * retryInSeconds));
        return StatusProto.toStatusRuntimeException(
                com.google.rpc.Status.newBuilder()
                        .setCode(failure.getCode().value())
                        .addDetails(Any.pack(again))
                        .build(),
                trailers);
    }

    /** Fails a number of calls, and answers the others. */
    private final class Fake extends InferenceServiceGrpc.InferenceServiceImplBase {
        @Override
        public void generate(GenerateRequest request, StreamObserver<GenerateResponse> to) {
            if (calls.incrementAndGet() <= failures) {
                to.onError(refusal());
                return;
            }
            Output output = Output.newBuilder().setText("x".repeat(5 << 20)).build();
            to.onNext(GenerateResponse.newBuilder().addOutputs(output).build());
            to.onCompleted();
        }

        @Override
        public void stream(StreamRequest request, StreamObserver<StreamResponse> to) {
            if (calls.incrementAndGet() <= failures) {
                to.onError(failure.asRuntimeException());
                return;
            }
            to.onNext(StreamResponse.newBuilder().setDelta(OutputDelta.newBuilder().setText("a")).build());
            to.onError(failure.asRuntimeException());
        }
    }

    @Test
    void whatIsUnavailableIsTriedAgain() throws IOException {
        failure = Status.UNAVAILABLE;
        failures = 1;
        try (PenstockClient client = builder().build()) {
            client.generate(Requests.generate(1).build());
        }
        assertEquals(2, calls.get());
    }

    @Test
    void nothingElseIsTriedAgain() throws IOException {
        failure = Status.RESOURCE_EXHAUSTED;
        failures = 1;
        try (PenstockClient client = builder().build()) {
            assertThrows(
                    LimitExceededException.class, () -> client.generate(Requests.generate(1).build()));
        }
        assertEquals(1, calls.get());
    }

    @Test
    void withoutRetriesACallIsMadeOnce() throws IOException {
        failure = Status.UNAVAILABLE;
        failures = 1;
        try (PenstockClient client = builder().withoutRetries().build()) {
            assertThrows(
                    UnavailableException.class, () -> client.generate(Requests.generate(1).build()));
        }
        assertEquals(1, calls.get());
    }

    @Test
    void aStreamIsTriedAgainBeforeItHasBegun() throws IOException {
        failure = Status.UNAVAILABLE;
        failures = 1;
        try (PenstockClient client = builder().build();
                ServerStream<StreamResponse> events = client.stream(Requests.stream(1).build())) {
            assertEquals("a", events.next().getDelta().getText());
        }
        assertEquals(2, calls.get());
    }

    @Test
    void aTimeoutLeavesNoTimeForAnotherAttempt() throws IOException {
        failure = Status.UNAVAILABLE;
        failures = 100;
        retryInSeconds = 20;
        try (PenstockClient client = builder().build()) {
            UnavailableException error = assertThrows(
                    UnavailableException.class,
                    () -> client.withTimeout(Duration.ofSeconds(10))
                            .generate(Requests.generate(1).build()));
            assertEquals(Optional.of(Duration.ofSeconds(20)), error.retryAfter());
        }
        assertEquals(1, calls.get());
    }

    @Test
    void aStreamThatHasBegunIsNotBegunAgain() throws IOException {
        failure = Status.UNAVAILABLE;
        try (PenstockClient client = builder().build();
                ServerStream<StreamResponse> events = client.stream(Requests.stream(1).build())) {
            assertEquals("a", events.next().getDelta().getText());
            assertThrows(UnavailableException.class, events::hasNext);
            assertThrows(UnavailableException.class, events::hasNext, "it stays failed");
        }
        assertEquals(1, calls.get());
    }

    @Test
    void aCancelByTheServerIsFinalOnceTheAnswerHasBegun() throws IOException {
        failure = Status.CANCELLED;
        failures = 1;
        try (PenstockClient client = builder().withoutRetries().build()) {
            assertThrows(
                    UnavailableException.Unreachable.class,
                    () -> client.generate(Requests.generate(1).build()));
            try (ServerStream<StreamResponse> events = client.stream(Requests.stream(1).build())) {
                events.next();
                assertThrows(CancelledException.class, events::hasNext);
            }
        }
    }

    @Test
    void aReplyAboveFourMebibytesIsTaken() throws IOException {
        try (PenstockClient client = builder().build()) {
            assertTrue(client.generate(Requests.generate(1).build()).getSerializedSize() > 5 << 20);
        }
    }

    @Test
    void aTimeoutMayBeLongerThanAnybodyLives() throws IOException {
        Duration longest = Duration.ofSeconds(Long.MAX_VALUE);
        try (PenstockClient client = builder().keepAlive(longest, longest).build()) {
            client.withTimeout(longest).generate(Requests.generate(1).build());
        }
    }

    @Test
    void aClientThatIsClosedIsNotWaitedFor() throws IOException {
        PenstockClient client = builder().build();
        client.close();
        assertThrows(CancelledException.class, () -> client.waitReady(Duration.ofSeconds(1)));
    }

    @Test
    void interceptorsSeeTheCalls() throws IOException {
        CalledMethods seen = new CalledMethods();
        try (PenstockClient client = builder().intercept(seen).build()) {
            client.generate(Requests.generate(1).build());
        }
        assertEquals(Set.of("penstock.v1.InferenceService/Generate"), seen.names());
    }
}
