package penstock.client;

import io.grpc.CallOptions;
import io.grpc.MethodDescriptor;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.TimeUnit;
import penstock.v1.ControlServiceGrpc;
import penstock.v1.InferenceServiceGrpc;

/** How long calls may take. */
final class Timeouts {
    private static final Duration FOR_ANSWERS = Duration.ofSeconds(10);
    private static final Duration FOR_LONG_TEXTS = Duration.ofSeconds(60);

    /** Of the calls that only ask or order. All others may take as long as they like. */
    private static final Map<MethodDescriptor<?, ?>, Duration> DEFAULTS = Map.ofEntries(
            Map.entry(InferenceServiceGrpc.getAbortMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getGetModelInfoMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getGetServerInfoMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getGetLoadMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getGetVocabularyMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getResumeMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getDiscardWeightsMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getFlushCacheMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getUnloadAdapterMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getPinAdapterMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getListAdaptersMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getSetTracingMethod(), FOR_ANSWERS),
            Map.entry(ControlServiceGrpc.getTokenizeMethod(), FOR_LONG_TEXTS),
            Map.entry(ControlServiceGrpc.getDetokenizeMethod(), FOR_LONG_TEXTS));

    private static final Duration LONGEST = Duration.ofDays(36_500);

    private Timeouts() {}

    /** The nanoseconds of a duration; for more than a hundred years, those of a hundred years. */
    static long nanos(Duration duration) {
        return (duration.compareTo(LONGEST) > 0 ? LONGEST : duration).toNanos();
    }

    static Duration checked(String name, Duration duration) {
        if (duration.isNegative() || duration.isZero()) {
            throw new IllegalArgumentException(name + " must be above 0, not " + duration);
        }
        return duration;
    }

    /** The options of a call that begins now. A timeout that was asked for overrides the method's default. */
    static CallOptions options(MethodDescriptor<?, ?> method, Optional<Duration> asked) {
        Duration timeout = asked.orElse(DEFAULTS.get(method));
        return timeout == null
                ? CallOptions.DEFAULT
                : CallOptions.DEFAULT.withDeadlineAfter(nanos(timeout), TimeUnit.NANOSECONDS);
    }
}
