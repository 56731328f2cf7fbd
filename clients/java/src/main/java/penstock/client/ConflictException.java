package penstock.client;

/** Another caller was first; nothing has changed. */
@SuppressWarnings("serial") // gRPC's exception, the cause, cannot be serialized
public class ConflictException extends PenstockException {
    ConflictException(Failure failure) {
        super(failure);
    }

    /** The weights in use are not those that expected_generation names. */
    public static final class GenerationChanged extends ConflictException {
        GenerationChanged(Failure failure) {
            super(failure);
        }
    }

    /** Another weight update is under way, or one is staged. */
    public static final class UpdateUnderWay extends ConflictException {
        UpdateUnderWay(Failure failure) {
            super(failure);
        }
    }

    /** Another profile is being recorded or written at the server. */
    public static final class ProfileUnderWay extends ConflictException {
        ProfileUnderWay(Failure failure) {
            super(failure);
        }
    }
}
