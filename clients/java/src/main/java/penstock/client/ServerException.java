package penstock.client;

/** A bug or a failure of the server. */
@SuppressWarnings("serial") // gRPC's exception, the cause, cannot be serialized
public final class ServerException extends PenstockException {
    ServerException(Failure failure) {
        super(failure);
    }
}
