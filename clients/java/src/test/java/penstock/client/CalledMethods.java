package penstock.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.MethodDescriptor;
import java.util.Set;
import java.util.concurrent.ConcurrentSkipListSet;

/** Notes which methods a client calls. */
final class CalledMethods implements ClientInterceptor {
    private final Set<String> names = new ConcurrentSkipListSet<>();

    Set<String> names() {
        return names;
    }

    @Override
    public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
        names.add(method.getFullMethodName());
        return next.newCall(method, options);
    }
}
