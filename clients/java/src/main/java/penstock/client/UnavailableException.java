package penstock.client;

/** The same request may succeed later, or at another server; {@link #retryAfter()} may say when. */
@SuppressWarnings("serial") // gRPC's exception, the cause, cannot be serialized
public class UnavailableException extends PenstockException {
    UnavailableException(Failure failure) {
        super(failure);
    }

    /** Too many requests are waiting. */
    public static final class QueueFull extends UnavailableException {
        QueueFull(Failure failure) {
            super(failure);
        }
    }

    /** A bound on what the server does at once is reached; the metadata "limit" names it. */
    public static final class Busy extends UnavailableException {
        Busy(Failure failure) {
            super(failure);
        }
    }

    /** The caller's key has used up its rate of requests or tokens. */
    public static final class RateLimited extends UnavailableException {
        RateLimited(Failure failure) {
            super(failure);
        }
    }

    /** The request's grammar took the server too long a short while ago. */
    public static final class CostlyGrammar extends UnavailableException {
        CostlyGrammar(Failure failure) {
            super(failure);
        }
    }

    /** The server is still loading or compiling. */
    public static final class NotReady extends UnavailableException {
        NotReady(Failure failure) {
            super(failure);
        }
    }

    /** The server is shutting down and takes no new requests. */
    public static final class Draining extends UnavailableException {
        Draining(Failure failure) {
            super(failure);
        }
    }

    /** The server's engine is dead; another server may answer. */
    public static final class EngineDead extends UnavailableException {
        EngineDead(Failure failure) {
            super(failure);
        }
    }

    /** One of the processes over which the model is cut was lost; they start again. */
    public static final class GroupEnded extends UnavailableException {
        GroupEnded(Failure failure) {
            super(failure);
        }
    }

    /** Nobody answers at that address, or the connection broke before an answer came. */
    public static final class Unreachable extends UnavailableException {
        Unreachable(Failure failure) {
            super(failure);
        }
    }
}
