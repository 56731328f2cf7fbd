package penstock.client;

/** The call's timeout passed. The server freed the request. */
@SuppressWarnings("serial") // gRPC's exception, the cause, cannot be serialized
public class DeadlineExceededException extends PenstockException {
    DeadlineExceededException(Failure failure) {
        super(failure);
    }

    /** Running requests took longer than drain_timeout; nothing has changed. */
    public static final class DrainTimeout extends DeadlineExceededException {
        DrainTimeout(Failure failure) {
            super(failure);
        }
    }
}
