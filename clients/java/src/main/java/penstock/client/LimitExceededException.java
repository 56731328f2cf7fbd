package penstock.client;

/** A limit that waiting does not lift: the size of a message, or a stream that was not read. */
@SuppressWarnings("serial") // gRPC's exception, the cause, cannot be serialized
public final class LimitExceededException extends PenstockException {
    LimitExceededException(Failure failure) {
        super(failure);
    }
}
