package penstock.client;

import java.util.Arrays;
import java.util.List;
import penstock.v1.TensorError;

/** The request is at fault, or its credentials are. Sending it again unchanged fails again. */
@SuppressWarnings("serial") // gRPC's exception, the cause, cannot be serialized
public class RefusedException extends PenstockException {
    RefusedException(Failure failure) {
        super(failure);
    }

    /** Fields are missing or out of range; {@link #violations()} lists all of them. */
    public static final class InvalidRequest extends RefusedException {
        InvalidRequest(Failure failure) {
            super(failure);
        }
    }

    /** The prompt leaves no room in the context; {@link #metadata()} has both numbers. */
    public static final class PromptTooLong extends RefusedException {
        PromptTooLong(Failure failure) {
            super(failure);
        }
    }

    /** The request would not fit the server's KV cache, even if it ran alone. */
    public static final class ExceedsKvCapacity extends RefusedException {
        ExceedsKvCapacity(Failure failure) {
            super(failure);
        }
    }

    /** The reply would be larger than the server sends. */
    public static final class ResponseTooLarge extends RefusedException {
        ResponseTooLarge(Failure failure) {
            super(failure);
        }
    }

    /** The request uses a part of the contract that this server does not have. */
    public static final class Unsupported extends RefusedException {
        Unsupported(Failure failure) {
            super(failure);
        }

        /**
         * Returns what is not supported.
         *
         * @return the contract's dotted paths; empty if the whole method is not supported
         */
        public List<String> fields() {
            return Arrays.stream(metadata().getOrDefault("field", "").split(","))
                    .map(String::strip)
                    .filter(field -> !field.isEmpty())
                    .toList();
        }
    }

    /** The server does this at another address: its control port, or its main one. */
    public static final class ServedElsewhere extends RefusedException {
        ServedElsewhere(Failure failure) {
            super(failure);
        }
    }

    /** The request names a model that is not served here. */
    public static final class UnknownModel extends RefusedException {
        UnknownModel(Failure failure) {
            super(failure);
        }
    }

    /** The request names an adapter that is not loaded here. */
    public static final class UnknownAdapter extends RefusedException {
        UnknownAdapter(Failure failure) {
            super(failure);
        }
    }

    /** The config or a tensor of an adapter is not what the model can have. */
    public static final class AdapterRefused extends RefusedException {
        AdapterRefused(Failure failure) {
            super(failure);
        }
    }

    /** No weight update with this id is staged or committed. */
    public static final class UnknownUpdate extends RefusedException {
        UnknownUpdate(Failure failure) {
            super(failure);
        }
    }

    /** A request with this id is active. */
    public static final class DuplicateRequestId extends RefusedException {
        DuplicateRequestId(Failure failure) {
            super(failure);
        }
    }

    /** The server refused tensors of a weight update. The old weights are in use. */
    public static final class TensorsRefused extends RefusedException {
        TensorsRefused(Failure failure) {
            super(failure);
        }

        /**
         * Returns every bad tensor, with what the model expects and what was sent.
         *
         * @return the errors, in the server's order
         */
        public List<TensorError> tensorErrors() {
            return details().tensorErrors();
        }

        /**
         * Says whether there are more bad tensors than a status has room for.
         *
         * @return true if {@link #tensorErrors()} is only a part
         */
        public boolean hasMore() {
            return details().hasMoreTensors();
        }
    }

    /** The server is not in the state that the request demands. */
    public static class PreconditionFailed extends RefusedException {
        PreconditionFailed(Failure failure) {
            super(failure);
        }
    }

    /** The weights in use are older than the request's min_weights. */
    public static final class WeightsTooOld extends PreconditionFailed {
        WeightsTooOld(Failure failure) {
            super(failure);
        }
    }

    /** Credentials are missing or wrong, or do not allow this. */
    public static class Denied extends RefusedException {
        Denied(Failure failure) {
            super(failure);
        }
    }

    /** Credentials are missing or wrong. */
    public static class Unauthenticated extends Denied {
        Unauthenticated(Failure failure) {
            super(failure);
        }
    }

    /** The key was valid until it expired. */
    public static final class KeyExpired extends Unauthenticated {
        KeyExpired(Failure failure) {
            super(failure);
        }
    }

    /** The credentials are valid, and do not allow this. */
    public static final class Forbidden extends Denied {
        Forbidden(Failure failure) {
            super(failure);
        }
    }
}
