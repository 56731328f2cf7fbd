package penstock.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RequestInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import penstock.v1.TensorError;
import penstock.v1.TensorErrors;

/** The status of a failed call, with the details that Penstock packs into it. Absent details are empty. */
record StatusDetails(
        Status.Code code,
        String text,
        String reason,
        Map<String, String> metadata,
        List<Violation> violations,
        Optional<Duration> retryAfter,
        String requestId,
        List<TensorError> tensorErrors,
        boolean hasMoreTensors) {

    private static final String DOMAIN = "penstock";

    /** Unpacks the status of a failed call. Details that cannot be read are left out. */
    static StatusDetails of(StatusRuntimeException error) {
        Status status = error.getStatus();
        com.google.rpc.Status packed = StatusProto.fromThrowable(error);
        List<Any> details = packed == null ? List.of() : packed.getDetailsList();
        ErrorInfo found = find(details, ErrorInfo.getDefaultInstance());
        // A proxy may have reasons of its own, with the same names.
        ErrorInfo info = found.getDomain().equals(DOMAIN) ? found : ErrorInfo.getDefaultInstance();
        TensorErrors tensors = find(details, TensorErrors.getDefaultInstance());
        return new StatusDetails(
                status.getCode(),
                text(status),
                info.getReason(),
                Map.copyOf(info.getMetadataMap()),
                find(details, BadRequest.getDefaultInstance()).getFieldViolationsList().stream()
                        .map(one -> new Violation(one.getField(), one.getDescription()))
                        .toList(),
                delay(find(details, RetryInfo.getDefaultInstance())),
                find(details, RequestInfo.getDefaultInstance()).getRequestId(),
                tensors.getErrorsList(),
                tensors.getTruncated());
    }

    /** The description, and what caused it: gRPC says "io exception" where nobody listens. */
    private static String text(Status status) {
        String text = status.getDescription() == null ? status.getCode().name() : status.getDescription();
        Throwable cause = status.getCause();
        while (cause != null && cause.getCause() != null) {
            cause = cause.getCause();
        }
        boolean tellsMore = cause != null && cause.getMessage() != null && !text.contains(cause.getMessage());
        return tellsMore ? text + ": " + cause.getMessage() : text;
    }

    private static Optional<Duration> delay(RetryInfo info) {
        if (!info.hasRetryDelay()) {
            return Optional.empty();
        }
        com.google.protobuf.Duration delay = info.getRetryDelay();
        return Optional.of(Duration.ofSeconds(delay.getSeconds(), delay.getNanos()));
    }

    /** The last detail of a type; the given default if there is none. */
    private static <T extends Message> T find(List<Any> details, T otherwise) {
        T found = otherwise;
        for (Any detail : details) {
            if (detail.isSameTypeAs(otherwise)) {
                try {
                    found = detail.unpackSameTypeAs(otherwise);
                } catch (InvalidProtocolBufferException unreadable) {
                    continue;
                }
            }
        }
        return found;
    }
}
