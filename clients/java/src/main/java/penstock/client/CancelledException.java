package penstock.client;

/** The call was cancelled: by this program, or by the server after a part of the answer had come. */
@SuppressWarnings("serial") // gRPC's exception, the cause, cannot be serialized
public final class CancelledException extends PenstockException {
    CancelledException(Failure failure) {
        super(failure);
    }
}
