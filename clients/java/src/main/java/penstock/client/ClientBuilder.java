package penstock.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ClientInterceptors;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.ManagedChannelRegistry;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.stub.MetadataUtils;
import java.io.IOException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.TimeUnit;

/** Says how to reach a server; made by {@link PenstockClient#builder}. */
public final class ClientBuilder {
    private static final Metadata.Key<String> AUTHORIZATION =
            Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

    private final Address address;
    private final List<ClientInterceptor> interceptors = new ArrayList<>();
    private Optional<ChannelCredentials> credentials = Optional.empty();
    private Optional<String> serverName = Optional.empty();
    private Optional<String> key = Optional.empty();
    private boolean plaintextKey;
    private boolean retries = true;
    private int maxMessageBytes = 64 << 20;
    private Duration keepAlive = Duration.ofSeconds(30);
    private Duration keepAliveTimeout = Duration.ofSeconds(10);

    ClientBuilder(String address) {
        this.address = Address.parse(address);
    }

    /**
     * Speaks TLS. Without it nothing is encrypted.
     *
     * @param tls whom to trust, and which certificate to show
     * @return this
     * @throws IOException if one of its files cannot be read
     */
    public ClientBuilder tls(Tls tls) throws IOException {
        this.credentials = Optional.of(tls.credentials());
        this.serverName = tls.serverName();
        return this;
    }

    /**
     * Sends a key with every call.
     *
     * @param key the key, such as "psk_..."
     * @return this
     * @throws IllegalArgumentException if it is not one word of printable ASCII characters
     */
    public ClientBuilder key(String key) {
        if (!key.matches("[!-~]+")) {
            throw new IllegalArgumentException("a key must be one word of printable ASCII characters");
        }
        this.key = Optional.of(key);
        return this;
    }

    /**
     * Allows to send the key in plaintext to another machine, where others on the network can read it. Without this
     * {@link #build()} refuses to.
     *
     * @return this
     */
    public ClientBuilder allowPlaintextKey() {
        this.plaintextKey = true;
        return this;
    }

    /**
     * Switches retries off. With them a call that ends with UNAVAILABLE before anything of its answer has come is
     * made up to five times in all, each time after what the server asks for and a random part of 0.5 s, 1 s, 2 s and
     * 4 s. Weight updates are never repeated, nor are calls of gRPC's own stubs.
     *
     * @return this
     */
    public ClientBuilder withoutRetries() {
        this.retries = false;
        return this;
    }

    /**
     * Bounds the size of messages, sent and received. The default is 64 MiB, since log-probabilities of a long prompt
     * are larger than gRPC's own 4 MiB.
     *
     * @param most bytes
     * @return this
     * @throws IllegalArgumentException if it is below 1
     */
    public ClientBuilder maxMessageBytes(int most) {
        if (most < 1) {
            throw new IllegalArgumentException("maxMessageBytes must be at least 1, not " + most);
        }
        this.maxMessageBytes = most;
        return this;
    }

    /**
     * Pings the connection while a call runs and nothing comes. The default is every 30 s, and 10 s for the answer.
     *
     * @param time from the last sign of life to the ping; gRPC makes it at least 10 s
     * @param timeout how long to wait for the answer until the connection is given up and its calls fail
     * @return this
     * @throws IllegalArgumentException if one of them is not above 0
     */
    public ClientBuilder keepAlive(Duration time, Duration timeout) {
        this.keepAlive = Timeouts.checked("the time of keepAlive", time);
        this.keepAliveTimeout = Timeouts.checked("the timeout of keepAlive", timeout);
        return this;
    }

    /**
     * Adds an interceptor of gRPC's, which sees every call, such as one that traces.
     *
     * @param interceptor it; the one that was added last sees a call first
     * @return this
     */
    public ClientBuilder intercept(ClientInterceptor interceptor) {
        this.interceptors.add(interceptor);
        return this;
    }

    /**
     * Makes the client. It connects when it is first used.
     *
     * @return a client, to be closed
     * @throws IllegalStateException if the key would be sent to another machine in plaintext
     * @throws IllegalArgumentException if a file of {@link Tls} holds no certificate, or no private key that fits it
     */
    public PenstockClient build() {
        if (key.isPresent() && credentials.isEmpty() && !address.local() && !plaintextKey) {
            throw new IllegalStateException("the key would be sent to " + address.target() + " in plaintext, readable"
                    + " for others on the network; use tls(), or allow it with allowPlaintextKey()");
        }
        ChannelCredentials used = credentials.orElseGet(InsecureChannelCredentials::create);
        ManagedChannelBuilder<?> builder = channelBuilder(used)
                .maxInboundMessageSize(maxMessageBytes)
                .keepAliveTime(Timeouts.nanos(keepAlive), TimeUnit.NANOSECONDS)
                .keepAliveTimeout(Timeouts.nanos(keepAliveTimeout), TimeUnit.NANOSECONDS);
        serverName.ifPresent(builder::overrideAuthority);
        ManagedChannel managed = builder.build();
        List<ClientInterceptor> all = new ArrayList<>();
        all.add(new MessageBound(maxMessageBytes));
        key.map(ClientBuilder::bearer).ifPresent(all::add);
        all.addAll(interceptors);
        Channel channel = ClientInterceptors.intercept(managed, all);
        return new PenstockClient(managed, channel, retries, maxMessageBytes, Optional.empty());
    }

    private ManagedChannelBuilder<?> channelBuilder(ChannelCredentials used) {
        try {
            return Grpc.newChannelBuilder(address.target(), used);
        } catch (ManagedChannelRegistry.ProviderNotFoundException error) { // which is how gRPC says it
            throw new IllegalArgumentException("TLS cannot be used: " + error.getMessage(), error);
        }
    }

    private static ClientInterceptor bearer(String key) {
        Metadata headers = new Metadata();
        headers.put(AUTHORIZATION, "Bearer " + key);
        return MetadataUtils.newAttachHeadersInterceptor(headers);
    }

    /** Bounds what is sent: gRPC's channel bounds only what comes. */
    private record MessageBound(int most) implements ClientInterceptor {
        @Override
        public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
            return next.newCall(method, options.withMaxOutboundMessageSize(most));
        }
    }
}
