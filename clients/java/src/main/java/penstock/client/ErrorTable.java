package penstock.client;

import io.grpc.Context;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.EnumMap;
import java.util.Map;
import java.util.function.Function;

/** Chooses the class of the exception for a failed call: by its reason, or else by its status. */
final class ErrorTable {
    private static final Map<String, Function<Failure, PenstockException>> BY_REASON = Map.ofEntries(
            Map.entry("INVALID_FIELD", RefusedException.InvalidRequest::new),
            Map.entry("PROMPT_TOO_LONG", RefusedException.PromptTooLong::new),
            Map.entry("EXCEEDS_KV_CAPACITY", RefusedException.ExceedsKvCapacity::new),
            Map.entry("RESPONSE_TOO_LARGE", RefusedException.ResponseTooLarge::new),
            Map.entry("UNSUPPORTED_FEATURE", RefusedException.Unsupported::new),
            Map.entry("SERVED_ELSEWHERE", RefusedException.ServedElsewhere::new),
            Map.entry("UNKNOWN_MODEL", RefusedException.UnknownModel::new),
            Map.entry("UNKNOWN_ADAPTER", RefusedException.UnknownAdapter::new),
            Map.entry("ADAPTER_FORMAT", RefusedException.AdapterRefused::new),
            Map.entry("UNKNOWN_UPDATE", RefusedException.UnknownUpdate::new),
            Map.entry("DUPLICATE_REQUEST_ID", RefusedException.DuplicateRequestId::new),
            Map.entry("INVALID_TENSORS", RefusedException.TensorsRefused::new),
            Map.entry("CHECKSUM_MISMATCH", RefusedException.TensorsRefused::new),
            Map.entry("WEIGHTS_TOO_OLD", RefusedException.WeightsTooOld::new),
            Map.entry("UNAUTHENTICATED", RefusedException.Unauthenticated::new),
            Map.entry("KEY_EXPIRED", RefusedException.KeyExpired::new),
            Map.entry("FORBIDDEN", RefusedException.Forbidden::new),
            Map.entry("QUEUE_FULL", UnavailableException.QueueFull::new),
            Map.entry("BUSY", UnavailableException.Busy::new),
            Map.entry("RATE_LIMITED", UnavailableException.RateLimited::new),
            Map.entry("COSTLY_GRAMMAR", UnavailableException.CostlyGrammar::new),
            Map.entry("NOT_READY", UnavailableException.NotReady::new),
            Map.entry("DRAINING", UnavailableException.Draining::new),
            Map.entry("ENGINE_DEAD", UnavailableException.EngineDead::new),
            Map.entry("GROUP_ENDED", UnavailableException.GroupEnded::new),
            Map.entry("GENERATION_CHANGED", ConflictException.GenerationChanged::new),
            Map.entry("UPDATE_UNDER_WAY", ConflictException.UpdateUnderWay::new),
            Map.entry("PROFILE_UNDER_WAY", ConflictException.ProfileUnderWay::new),
            Map.entry("DRAIN_TIMEOUT", DeadlineExceededException.DrainTimeout::new));

    /** For reasons that are absent or unknown. A status that is not here is a ServerException. */
    private static final Map<Status.Code, Function<Failure, PenstockException>> BY_CODE =
            new EnumMap<>(Map.ofEntries(
                    Map.entry(Status.Code.INVALID_ARGUMENT, RefusedException.InvalidRequest::new),
                    Map.entry(Status.Code.OUT_OF_RANGE, RefusedException.InvalidRequest::new),
                    Map.entry(Status.Code.NOT_FOUND, RefusedException::new),
                    Map.entry(Status.Code.ALREADY_EXISTS, RefusedException.DuplicateRequestId::new),
                    Map.entry(Status.Code.FAILED_PRECONDITION, RefusedException.PreconditionFailed::new),
                    Map.entry(Status.Code.UNIMPLEMENTED, RefusedException.Unsupported::new),
                    Map.entry(Status.Code.UNAUTHENTICATED, RefusedException.Unauthenticated::new),
                    Map.entry(Status.Code.PERMISSION_DENIED, RefusedException.Forbidden::new),
                    Map.entry(Status.Code.RESOURCE_EXHAUSTED, LimitExceededException::new),
                    Map.entry(Status.Code.UNAVAILABLE, UnavailableException::new),
                    Map.entry(Status.Code.ABORTED, ConflictException::new),
                    Map.entry(Status.Code.DEADLINE_EXCEEDED, DeadlineExceededException::new),
                    Map.entry(Status.Code.CANCELLED, CancelledException::new)));

    /** How gRPC's descriptions begin for calls on a channel that was closed here. */
    private static final String CHANNEL_CLOSED = "Channel shutdown";

    private ErrorTable() {}

    /**
     * Makes the exception for a failed call.
     *
     * <p>A status UNAVAILABLE without a reason comes from gRPC: nobody answers. So does a CANCELLED that this program
     * did not ask for, before anything of the answer has come: the connection met a server that was shutting down.
     *
     * <p>A request that cannot be sent, such as one that is too large, is CANCELLED by gRPC, and the cause says why.
     *
     * @param mayBeCancelled whether CANCELLED is to be taken as such: this program cancelled, or a part of the answer
     *     has come
     */
    static PenstockException exception(StatusRuntimeException error, boolean mayBeCancelled, String updateId) {
        if (error.getStatus().getCode() == Status.Code.CANCELLED
                && error.getStatus().getCause() instanceof StatusRuntimeException reason) {
            return exception(reason, mayBeCancelled, updateId);
        }
        StatusDetails details = StatusDetails.of(error);
        Failure failure = new Failure(details, error, updateId);
        Function<Failure, PenstockException> byReason = BY_REASON.get(details.reason());
        if (byReason != null) {
            return byReason.apply(failure);
        }
        if (details.reason().isEmpty()) {
            if (endedHere(error)) {
                return new CancelledException(failure);
            }
            boolean lost = details.code() == Status.Code.CANCELLED && !mayBeCancelled;
            if (lost || details.code() == Status.Code.UNAVAILABLE) {
                return new UnavailableException.Unreachable(failure);
            }
        }
        return BY_CODE.getOrDefault(details.code(), ServerException::new).apply(failure);
    }

    /** Whether this program ended the call: by an interrupt, by gRPC's context, or by closing the client. */
    private static boolean endedHere(StatusRuntimeException error) {
        Status status = error.getStatus();
        return switch (status.getCode()) {
            case CANCELLED ->
                status.getCause() instanceof InterruptedException || Context.current().isCancelled();
            case UNAVAILABLE ->
                status.getDescription() != null && status.getDescription().startsWith(CHANNEL_CLOSED);
            default -> false;
        };
    }
}
