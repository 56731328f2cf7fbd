package penstock.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;

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
 * <p>{@link #hasNext()} waits for the next message, and throws a {@link PenstockException} if the call fails. The server
 * sends no more than one message ahead of the reader besides those on the wire, so a slow reader slows the server.
 * One thread reads; any thread may close.
 *
 * @param <T> the type of the messages
 */
public final class ServerStream<T> implements Iterator<T>, Iterable<T>, AutoCloseable {
    private final BlockingQueue<Arrival<T>> arrived = new LinkedBlockingQueue<>();
    private final ClientCall<?, T> call;
    private boolean began;
    private Arrival<T> next;
    private volatile boolean closedHere;

    /** Either a message, or the end of the call. */
    private record Arrival<T>(T message, Status status, Metadata trailers) {}

    private ServerStream(ClientCall<?, T> call) {
        this.call = call;
    }

    /** Makes the call. */
    static <Q, A> ServerStream<A> start(Channel channel, MethodDescriptor<Q, A> method, CallOptions options, Q request) {
        ClientCall<Q, A> call = channel.newCall(method, options);
        ServerStream<A> stream = new ServerStream<>(call);
        call.start(stream.new Listener(), new Metadata());
        call.request(1);
        call.sendMessage(request);
        call.halfClose();
        return stream;
    }

    /**
     * Waits for the next message.
     *
     * @return whether there is one; false when the call has ended with OK
     * @throws PenstockException if the call failed; again at each further call
     */
    @Override
    public boolean hasNext() {
        if (next == null) {
            next = take();
        }
        if (next.status() == null) {
            return true;
        }
        if (next.status().isOk()) {
            return false;
        }
        throw ErrorTable.exception(
                new StatusRuntimeException(next.status(), next.trailers()), began || closedHere, "");
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
        closedHere = true;
        call.cancel("the stream was closed", null);
    }

    private Arrival<T> take() {
        try {
            return arrived.take();
        } catch (InterruptedException interrupted) {
            closedHere = true;
            call.cancel("the thread that reads was interrupted", interrupted);
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
