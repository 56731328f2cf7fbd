package penstock.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;

/**
 * A running call whose requests are sent one by one, each when the connection has room for it. Closing it cancels the
 * call unless it has ended.
 *
 * @param <Q> the type of the requests
 * @param <A> the type of the response
 */
final class ClientStream<Q, A> implements AutoCloseable {
    private final ClientCall<Q, A> call;
    private A response;
    private Status status;
    private Metadata trailers;

    private ClientStream(ClientCall<Q, A> call) {
        this.call = call;
    }

    static <Q, A> ClientStream<Q, A> start(Channel channel, MethodDescriptor<Q, A> method, CallOptions options) {
        ClientCall<Q, A> call = channel.newCall(method, options);
        ClientStream<Q, A> stream = new ClientStream<>(call);
        call.start(stream.new Listener(), new Metadata());
        call.request(2); // as gRPC's own stubs do, to notice a second response
        return stream;
    }

    /** Waits for room and sends a message. Returns false if the call has ended, so that nobody would take it. */
    synchronized boolean send(Q message) {
        while (status == null && !call.isReady()) {
            waitForNews();
        }
        if (status != null) {
            return false;
        }
        call.sendMessage(message);
        return true;
    }

    synchronized void halfClose() {
        if (status == null) {
            call.halfClose();
        }
    }

    /** Waits for the end. Throws gRPC's exception unless the call ended with OK. */
    synchronized A response() {
        while (status == null) {
            waitForNews();
        }
        if (!status.isOk()) {
            throw new StatusRuntimeException(status, trailers);
        }
        if (response == null) {
            throw Status.INTERNAL.withDescription("the call ended with OK and without a response").asRuntimeException();
        }
        return response;
    }

    @Override
    public void close() {
        call.cancel("the call was given up", null);
    }

    private void waitForNews() {
        try {
            wait();
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            throw Status.CANCELLED
                    .withDescription("the thread that sends was interrupted")
                    .withCause(interrupted)
                    .asRuntimeException();
        }
    }

    private final class Listener extends ClientCall.Listener<A> {
        @Override
        public void onMessage(A message) {
            synchronized (ClientStream.this) {
                response = message;
            }
        }

        @Override
        public void onReady() {
            synchronized (ClientStream.this) {
                ClientStream.this.notifyAll();
            }
        }

        @Override
        public void onClose(Status ended, Metadata with) {
            synchronized (ClientStream.this) {
                status = ended;
                trailers = with;
                ClientStream.this.notifyAll();
            }
        }
    }
}
