package penstock.client;

import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * A call that failed. The subclasses say what a caller can do about it:
 *
 * <pre>
 * RefusedException            the request is at fault; sending it again unchanged fails again
 *   .InvalidRequest           violations() lists every bad field
 *   .PromptTooLong, .ExceedsKvCapacity, .ResponseTooLarge
 *   .Unsupported              fields() lists what this server does not have
 *   .ServedElsewhere, .UnknownModel, .UnknownAdapter, .UnknownUpdate, .DuplicateRequestId
 *   .AdapterRefused           its config or a tensor is not what the model can have
 *   .TensorsRefused           tensorErrors() lists every bad tensor of a weight update
 *   .PreconditionFailed       also .WeightsTooOld
 *   .Denied                   .Unauthenticated, also .KeyExpired; and .Forbidden
 * UnavailableException        the same request may succeed later, or at another server
 *   .QueueFull, .Busy, .RateLimited, .CostlyGrammar, .NotReady, .Draining, .EngineDead
 *   .GroupEnded
 *   .Unreachable              nobody answers, or the connection broke
 * ConflictException           .GenerationChanged, .UpdateUnderWay, .ProfileUnderWay
 * DeadlineExceededException   the call's timeout passed; also .DrainTimeout
 * LimitExceededException      a limit that waiting does not lift, such as the size of a message
 * CancelledException          the call was cancelled
 * ServerException             a bug or a failure of the server
 * </pre>
 *
 * <p>The cause of each is gRPC's {@link StatusRuntimeException}.
 */
@SuppressWarnings("serial") // gRPC's exception, the cause, cannot be serialized
public abstract class PenstockException extends RuntimeException {
    private final transient Failure failure;

    PenstockException(Failure failure) {
        super(failure.details().text(), failure.cause());
        this.failure = failure;
    }

    /**
     * Makes the exception for a call that failed on a stub of gRPC's own.
     *
     * @param error what the stub threw
     * @return the exception of the most fitting class, with the error as its cause
     */
    public static PenstockException from(StatusRuntimeException error) {
        return ErrorTable.exception(error, false, "");
    }

    /**
     * Returns the status of the call.
     *
     * @return its code, such as UNAVAILABLE
     */
    public Status.Code code() {
        return details().code();
    }

    /**
     * Returns the reason, as docs/reference/errors.md lists it.
     *
     * @return the reason of google.rpc.ErrorInfo, such as "QUEUE_FULL"; empty if the failure is not Penstock's but
     *     gRPC's or a proxy's
     */
    public String reason() {
        return details().reason();
    }

    /**
     * Returns the facts that belong to the reason.
     *
     * @return the metadata of google.rpc.ErrorInfo, such as both numbers of PROMPT_TOO_LONG
     */
    public Map<String, String> metadata() {
        return details().metadata();
    }

    /**
     * Returns what is wrong with the fields of the request.
     *
     * @return all violations of google.rpc.BadRequest; empty if there are none
     */
    public List<Violation> violations() {
        return details().violations();
    }

    /**
     * Returns how long the server asks to wait before the same call.
     *
     * @return the delay of google.rpc.RetryInfo; empty if the server did not say
     */
    public Optional<Duration> retryAfter() {
        return details().retryAfter();
    }

    /**
     * Returns the request's id, as in the server's log.
     *
     * @return the id; empty if the server did not say
     */
    public String requestId() {
        return details().requestId();
    }

    /**
     * Returns the id of the weight update that failed. The same update with this id asks for its outcome.
     *
     * @return the id; empty for other calls
     */
    public String updateId() {
        return failure.updateId();
    }

    StatusDetails details() {
        return failure.details();
    }
}
