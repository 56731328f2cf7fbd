package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.net.ServerSocket;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import penstock.v1.AbortOutcome;
import penstock.v1.AbortRequest;
import penstock.v1.FinishReason;
import penstock.v1.GetLoadResponse;
import penstock.v1.RequestIds;
import penstock.v1.StreamResponse;
import penstock.v1.WatchLoadRequest;
import penstock.v1.WatchLoadResponse;

/** Calls that end before their time. A paused server keeps requests for as long as a test needs. */
@SuppressWarnings("try") // a pause is only to end with its block
class EndingTest {
    private static PenstockClient client;

    @BeforeAll
    static void connect() throws Exception {
        client = DemoServer.shared().client();
    }

    @AfterAll
    static void close() {
        client.close();
    }

    /** Waits until the server has so many requests, running or waiting. */
    private static void requests(int number) throws InterruptedException {
        Requests.waitUntil(number + " requests", () -> {
            GetLoadResponse load = client.load();
            return load.getRunningRequests() + load.getQueuedRequests() == number;
        });
    }

    /** A stream that has started. */
    private static ServerStream<StreamResponse> started(PenstockClient by) {
        ServerStream<StreamResponse> stream = by.stream(Requests.stream(1000).build());
        assertTrue(stream.next().hasStarted());
        return stream;
    }

    @Test
    void closingAStreamFreesItsSlot() throws Exception {
        try (AutoCloseable pause = Requests.paused(client)) {
            try (ServerStream<StreamResponse> stream = started(client)) {
                requests(1);
            }
            requests(0);
        }
    }

    @Test
    void aStreamThatIsReadIsClosedByAnotherThread() throws Exception {
        try (AutoCloseable pause = Requests.paused(client)) {
            ServerStream<StreamResponse> stream = started(client);
            CompletableFuture<Boolean> reader = CompletableFuture.supplyAsync(stream::hasNext);
            requests(1);
            stream.close();
            ExecutionException failed =
                    assertThrows(ExecutionException.class, () -> reader.get(30, TimeUnit.SECONDS));
            assertEquals(CancelledException.class, failed.getCause().getClass());
            requests(0);
        }
    }

    @Test
    void anInterruptOfTheReaderFreesTheSlot() throws Exception {
        try (AutoCloseable pause = Requests.paused(client)) {
            CompletableFuture<PenstockException> found = new CompletableFuture<>();
            CountDownLatch hasStarted = new CountDownLatch(1);
            Thread reader = new Thread(() -> {
                try (ServerStream<StreamResponse> stream = started(client)) {
                    hasStarted.countDown();
                    found.complete(assertThrows(CancelledException.class, stream::hasNext));
                    assertTrue(Thread.currentThread().isInterrupted());
                } catch (Throwable error) {
                    found.completeExceptionally(error);
                }
            });
            reader.start();
            assertTrue(hasStarted.await(30, TimeUnit.SECONDS));
            reader.interrupt();
            found.get(30, TimeUnit.SECONDS);
            requests(0);
        }
    }

    @Test
    void anInterruptEndsGenerate() throws Exception {
        try (AutoCloseable pause = Requests.paused(client)) {
            CompletableFuture<Throwable> found = new CompletableFuture<>();
            Thread caller = new Thread(() -> {
                try {
                    client.generate(Requests.generate(1000).build());
                    found.complete(null);
                } catch (RuntimeException error) {
                    found.complete(error);
                }
            });
            caller.start();
            requests(1);
            caller.interrupt();
            assertEquals(CancelledException.class, found.get(30, TimeUnit.SECONDS).getClass());
            requests(0);
        }
    }

    @Test
    void aTimeoutEndsACallAndFreesItsSlot() throws Exception {
        try (AutoCloseable pause = Requests.paused(client)) {
            PenstockClient hurried = client.withTimeout(Duration.ofMillis(300));
            assertThrows(
                    DeadlineExceededException.class,
                    () -> hurried.generate(Requests.generate(1000).build()));
            try (ServerStream<StreamResponse> stream = hurried.stream(Requests.stream(1000).build())) {
                assertThrows(DeadlineExceededException.class, () -> stream.forEachRemaining(event -> {}));
            }
            requests(0);
        }
        assertThrows(IllegalArgumentException.class, () -> client.withTimeout(Duration.ZERO));
    }

    @Test
    void anAbortEndsAStreamAsAWhole() throws Exception {
        try (AutoCloseable pause = Requests.paused(client);
                ServerStream<StreamResponse> stream =
                        client.stream(Requests.stream(1000).setRequestId("story-1").build())) {
            requests(1);
            RequestIds ids = RequestIds.newBuilder().addIds("story-1").build();
            var results = client.abort(AbortRequest.newBuilder().setRequestIds(ids).setReason("enough").build())
                    .getResultsList();
            assertEquals(AbortOutcome.ABORT_OUTCOME_ABORTED, results.get(0).getOutcome());
            StreamResponse last = null;
            StreamResponse beforeLast = null;
            while (stream.hasNext()) {
                beforeLast = last;
                last = stream.next();
            }
            assertTrue(last.hasSummary());
            assertEquals(
                    FinishReason.FINISH_REASON_ABORTED,
                    beforeLast.getFinished().getFinish().getReason());
            assertEquals("enough", beforeLast.getFinished().getFinish().getMessage());
        }
    }

    @Test
    void aSecondRequestWithTheSameIdIsRefused() throws Exception {
        try (AutoCloseable pause = Requests.paused(client);
                ServerStream<StreamResponse> stream =
                        client.stream(Requests.stream(1000).setRequestId("twin").build())) {
            assertTrue(stream.next().hasStarted());
            assertThrows(
                    RefusedException.DuplicateRequestId.class,
                    () -> client.generate(Requests.generate(1).setRequestId("twin").build()));
        }
    }

    @Test
    void closingTheClientEndsItsCalls() throws Exception {
        try (AutoCloseable pause = Requests.paused(client)) {
            PenstockClient other = DemoServer.shared().client();
            ServerStream<StreamResponse> stream = started(other);
            requests(1);
            other.close();
            assertThrows(CancelledException.class, stream::hasNext);
            assertThrows(CancelledException.class, other::load);
            requests(0);
        }
    }

    @Test
    void shutdownLetsCallsFinish() throws Exception {
        PenstockClient other = DemoServer.shared().client();
        ServerStream<StreamResponse> stream = started(other);
        CompletableFuture<Boolean> allFinished = CompletableFuture.supplyAsync(() -> {
            try {
                return other.shutdown(Duration.ofSeconds(60));
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
        });
        StreamResponse last = null;
        while (stream.hasNext()) {
            last = stream.next();
        }
        assertEquals(1000, last.getSummary().getUsage().getCompletionTokens());
        assertTrue(allFinished.get(60, TimeUnit.SECONDS));
        assertThrows(CancelledException.class, other::load);
    }

    @Test
    void watchLoadGoesOnUntilItIsClosed() {
        WatchLoadRequest often = WatchLoadRequest.newBuilder()
                .setInterval(com.google.protobuf.Duration.newBuilder().setNanos(100_000_000))
                .build();
        try (ServerStream<WatchLoadResponse> loads = client.watchLoad(often)) {
            assertSame(loads, loads.iterator());
            for (int i = 0; i < 3; i++) {
                assertTrue(loads.next().hasLoad());
            }
        }
    }

    @Test
    void nobodyAtTheAddressIsUnreachable() throws Exception {
        int free;
        try (ServerSocket probe = new ServerSocket(0)) {
            free = probe.getLocalPort();
        }
        try (PenstockClient lost =
                PenstockClient.builder("127.0.0.1:" + free).withoutRetries().build()) {
            PenstockException refused = assertThrows(UnavailableException.Unreachable.class, lost::load);
            assertTrue(refused.getMessage().contains("Connection refused"), refused.getMessage());
            UnavailableException error =
                    assertThrows(UnavailableException.class, () -> lost.waitReady(Duration.ofMillis(300)));
            assertFalse(error.getMessage().isEmpty());
        }
    }

    @Test
    void aDeadNetworkIsNoticedByPings() throws Exception {
        try (AutoCloseable pause = Requests.paused(client);
                FreezingProxy proxy = new FreezingProxy(DemoServer.shared().port());
                PenstockClient behind = PenstockClient.builder(proxy.address())
                        .keepAlive(Duration.ofSeconds(10), Duration.ofSeconds(1)) // gRPC's least
                        .build()) {
            ServerStream<StreamResponse> stream = started(behind);
            proxy.freeze();
            PenstockException error = assertThrows(PenstockException.class, stream::hasNext);
            assertEquals(UnavailableException.Unreachable.class, error.getClass());
            assertTrue(error.getMessage().toLowerCase().contains("keepalive"), error.getMessage());
        }
    }
}
