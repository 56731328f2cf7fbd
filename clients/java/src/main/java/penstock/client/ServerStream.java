package penstock.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * The messages of a running call, in order. {@link #close()} ends the call: use it in a try-with-resources block, so
 * that the server stops when you do.
 *
 * <pre>
 * try (ServerStream&lt;StreamResponse&gt; events = client.stream(request)) {
 *     for (StreamResponse event : events) {
 *         System.out.print(event.getDelta().getText());
 *     }
 * }
 * </pre>
 *
 * <p>{@link #hasNext()} waits for the next message, and throws a {@link PenstockException} if the call fails. The
 * client asks for a message when the one before was read, so a slow reader slows the server. One thread reads; any
 * thread may close.
 *
 * @param <T> the type of the messages
 */
public final class ServerStream<T> implements Iterator<T>, Iterable<T>, AutoCloseable {
    private final BlockingQueue<Arrival<T>> arrived = new LinkedBlockingQueue<>();
    private final CountDownLatch closed = new CountDownLatch(1);
    private final Function<ClientCall.Listener<T>, ClientCall<?, T>> start;
    private final Attempts attempts;
    private volatile ClientCall<?, T> call;
    private boolean began;
    private Arrival<T> next;
    private PenstockException failed;

    /** Either a message, or the end of a call. */
    private record Arrival<T>(T message, Status status, Metadata trailers) {}

    private ServerStream(Function<ClientCall.Listener<T>, ClientCall<?, T>> start, Attempts attempts) {
        this.start = start;
        this.attempts = attempts;
        this.call = start.apply(new Listener());
    }

    /** Makes the call. */
    static <Q, A> ServerStream<A> start(
            Channel channel, MethodDescriptor<Q, A> method, CallOptions options, Q request, Attempts attempts) {
        return new ServerStream<>(
                listener -> {
                    ClientCall<Q, A> call = channel.newCall(method, options);
                    call.start(listener, new Metadata());
                    call.request(1);
                    try {
                        call.sendMessage(request);
                        call.halfClose();
                    } catch (StatusRuntimeException error) { // it is too large
                        call.cancel("the request cannot be sent", error);
                        throw ErrorTable.exception(error, true, "");
                    }
                    return call;
                },
                attempts);
    }

    /**
     * Waits for the next message.
     *
     * @return whether there is one; false when the call has ended with OK
     * @throws PenstockException if the call failed; again at each further call
     */
    @Override
    public boolean hasNext() {
        while (failed == null) {
            if (next == null) {
                next = take();
            }
            if (next.status() == null) {
                return true;
            }
            if (next.status().isOk()) {
                return false;
            }
            StatusRuntimeException error = new StatusRuntimeException(next.status(), next.trailers());
            PenstockException failure = ErrorTable.exception(error, began || isClosed(), "");
            Optional<Duration> delay = began || isClosed() ? Optional.empty() : attempts.delayAfter(failure);
            if (delay.isPresent() && waited(delay.get())) {
                next = null;
                again();
            } else {
                failed = failure;
            }
        }
        throw failed;
    }

    /**
     * Waits for the next message, and returns it.
     *
     * @return the message
     * @throws NoSuchElementException if there is none
     * @throws PenstockException if the call failed
     */
    @Override
    public T next() {
        if (!hasNext()) {
            throw new NoSuchElementException("the stream has ended");
        }
        T message = next.message();
        next = null;
        began = true;
        call.request(1);
        return message;
    }

    /**
     * Returns this stream itself, for loops. It can be read only once.
     *
     * @return this
     */
    @Override
    public Iterator<T> iterator() {
        return this;
    }

    /** Cancels the call, unless it has ended. Whoever waits for a message then finds a CancelledException. */
    @Override
    public void close() {
        closed.countDown();
        call.cancel("the stream was closed", null);
    }

    private boolean isClosed() {
        return closed.getCount() == 0;
    }

    private void again() {
        call = start.apply(new Listener());
        if (isClosed()) { // perhaps before the new call was there to be cancelled
            close();
        }
    }

    /** Waits before the next attempt. Returns false if there is to be none, because somebody has ended the stream. */
    private boolean waited(Duration delay) {
        try {
            return !closed.await(delay.toNanos(), TimeUnit.NANOSECONDS);
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            return false;
        }
    }

    private Arrival<T> take() {
        try {
            return arrived.take();
        } catch (InterruptedException interrupted) {
            close();
            Thread.currentThread().interrupt();
            Status status = Status.CANCELLED
                    .withDescription("the thread that reads was interrupted")
                    .withCause(interrupted);
            return new Arrival<>(null, status, new Metadata());
        }
    }

    private final class Listener extends ClientCall.Listener<T> {
        @Override
        public void onMessage(T message) {
            arrived.add(new Arrival<>(message, null, null));
        }

        @Override
        public void onClose(Status status, Metadata trailers) {
            arrived.add(new Arrival<>(null, status, trailers));
        }
    }
}
