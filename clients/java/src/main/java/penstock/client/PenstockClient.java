package penstock.client;

import com.google.protobuf.Message;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCalls;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.TimeUnit;
import penstock.v1.AbortRequest;
import penstock.v1.AbortResponse;
import penstock.v1.ClassifyRequest;
import penstock.v1.ClassifyResponse;
import penstock.v1.CommitWeightsRequest;
import penstock.v1.CommitWeightsResponse;
import penstock.v1.ControlServiceGrpc;
import penstock.v1.DetokenizeRequest;
import penstock.v1.DetokenizeResponse;
import penstock.v1.DiscardWeightsRequest;
import penstock.v1.DiscardWeightsResponse;
import penstock.v1.EmbedRequest;
import penstock.v1.EmbedResponse;
import penstock.v1.FlushCacheRequest;
import penstock.v1.FlushCacheResponse;
import penstock.v1.GenerateRequest;
import penstock.v1.GenerateResponse;
import penstock.v1.GetLoadRequest;
import penstock.v1.GetLoadResponse;
import penstock.v1.GetModelInfoRequest;
import penstock.v1.GetModelInfoResponse;
import penstock.v1.GetServerInfoRequest;
import penstock.v1.GetServerInfoResponse;
import penstock.v1.GetVocabularyRequest;
import penstock.v1.GetVocabularyResponse;
import penstock.v1.InferenceServiceGrpc;
import penstock.v1.ListAdaptersRequest;
import penstock.v1.ListAdaptersResponse;
import penstock.v1.LoadAdapterRequest;
import penstock.v1.LoadAdapterResponse;
import penstock.v1.PauseRequest;
import penstock.v1.PauseResponse;
import penstock.v1.PinAdapterRequest;
import penstock.v1.PinAdapterResponse;
import penstock.v1.ProfileRequest;
import penstock.v1.ProfileResponse;
import penstock.v1.PushAdapterBegin;
import penstock.v1.PushAdapterResponse;
import penstock.v1.RerankRequest;
import penstock.v1.RerankResponse;
import penstock.v1.ResumeRequest;
import penstock.v1.ResumeResponse;
import penstock.v1.ScoreRequest;
import penstock.v1.ScoreResponse;
import penstock.v1.SetTracingRequest;
import penstock.v1.SetTracingResponse;
import penstock.v1.StreamRequest;
import penstock.v1.StreamResponse;
import penstock.v1.TokenizeRequest;
import penstock.v1.TokenizeResponse;
import penstock.v1.UnloadAdapterRequest;
import penstock.v1.UnloadAdapterResponse;
import penstock.v1.UpdateWeightsBegin;
import penstock.v1.UpdateWeightsResponse;
import penstock.v1.WatchLoadRequest;
import penstock.v1.WatchLoadResponse;

/**
 * A client of one server. It is safe for use by many threads, which share its connection.
 *
 * <p>Each method makes one call of the contract, and throws a {@link PenstockException} if that fails. Calls that
 * only ask or order end after 10 s, and those that tokenize after 60 s, with a {@link DeadlineExceededException}; the
 * others have no limit unless {@link #withTimeout} sets one.
 */
public final class PenstockClient implements AutoCloseable {
    private final ManagedChannel managed;
    private final Channel channel;
    private final boolean retries;
    private final int maxMessageBytes;
    private final Optional<Duration> timeout;

    PenstockClient(
            ManagedChannel managed, Channel channel, boolean retries, int maxMessageBytes, Optional<Duration> timeout) {
        this.managed = managed;
        this.channel = channel;
        this.retries = retries;
        this.maxMessageBytes = maxMessageBytes;
        this.timeout = timeout;
    }

    /**
     * Says how to reach a server.
     *
     * @param address "host:port", "unix:/path", or "dns:///host:port"; the port is 50051 unless given
     * @return a builder
     * @throws IllegalArgumentException if that is no address
     */
    public static ClientBuilder builder(String address) {
        return new ClientBuilder(address);
    }

    /**
     * Gives this client another timeout for each of its calls.
     *
     * @param timeout how long a call may take, retries included
     * @return a client that shares this one's connection, which is closed with either of them
     * @throws IllegalArgumentException if it is not above 0
     */
    public PenstockClient withTimeout(Duration timeout) {
        Duration checked = Timeouts.checked("the timeout", timeout);
        return new PenstockClient(managed, channel, retries, maxMessageBytes, Optional.of(checked));
    }

    /**
     * Returns the connection, for stubs of gRPC's own, such as {@code InferenceServiceGrpc.newFutureStub(channel)}.
     * Their calls send the key, too. They are not retried, and throw gRPC's exceptions, of which
     * {@link PenstockException#from} makes ours.
     *
     * @return the channel
     */
    public Channel channel() {
        return channel;
    }

    /**
     * Waits until the server answers and is ready.
     *
     * @param patience how long to wait
     * @throws UnavailableException if the server is not ready by then
     * @throws InterruptedException if the thread is interrupted
     */
    public void waitReady(Duration patience) throws InterruptedException {
        new Readiness(managed, channel).await(patience);
    }

    /**
     * Runs a prompt to its end and answers once.
     *
     * @param request the prompt, and how to go on
     * @return all outputs
     */
    public GenerateResponse generate(GenerateRequest request) {
        return unary(InferenceServiceGrpc.getGenerateMethod(), request);
    }

    /**
     * Runs a prompt, and gives tokens as they are made: started, deltas, one finished for each output, summary.
     *
     * @param request the prompt, and how to go on
     * @return the events; close it to end the request
     */
    public ServerStream<StreamResponse> stream(StreamRequest request) {
        return streaming(InferenceServiceGrpc.getStreamMethod(), request);
    }

    /**
     * Makes vectors of texts, by which they can be compared.
     *
     * @param request the inputs
     * @return a vector for each
     */
    public EmbedResponse embed(EmbedRequest request) {
        return unary(InferenceServiceGrpc.getEmbedMethod(), request);
    }

    /**
     * Asks how likely the model finds continuations of a prompt.
     *
     * @param request the prompt and the continuations
     * @return the log-probabilities of each
     */
    public ScoreResponse score(ScoreRequest request) {
        return unary(InferenceServiceGrpc.getScoreMethod(), request);
    }

    /**
     * Asks how relevant documents are to a query.
     *
     * @param request the query and the documents
     * @return the relevance of each, the most relevant first
     */
    public RerankResponse rerank(RerankRequest request) {
        return unary(InferenceServiceGrpc.getRerankMethod(), request);
    }

    /**
     * Asks to which classes texts belong.
     *
     * @param request the texts
     * @return the classes of each
     */
    public ClassifyResponse classify(ClassifyRequest request) {
        return unary(InferenceServiceGrpc.getClassifyMethod(), request);
    }

    /**
     * Ends requests early. It answers when their memory is free.
     *
     * @param request which requests
     * @return what became of each
     */
    public AbortResponse abort(AbortRequest request) {
        return unary(InferenceServiceGrpc.getAbortMethod(), request);
    }

    /**
     * Replaces the weights by those of a safetensors file, or of a directory of them. They are read and sent in pieces.
     *
     * <p>An update with the id of one that was applied changes nothing and answers ALREADY_COMMITTED. So a lost answer
     * can be asked for by the same call with {@link PenstockException#updateId()}.
     *
     * @param tensors the file or directory
     * @param begin how to update; version_label is required, the source must be unset, and an update_id is made if
     *     there is none
     * @param progress is told after each piece
     * @return what came of the update
     * @throws IOException if a file cannot be read, or is no safetensors file; then nothing has changed
     * @throws IllegalArgumentException if begin has a source
     */
    public UpdateWeightsResponse updateWeights(Path tensors, UpdateWeightsBegin begin, UpdateProgress progress)
            throws IOException {
        return upload(begin).send(SafetensorsFile.open(tensors), progress);
    }

    /**
     * Replaces the weights as {@link #updateWeights(Path, UpdateWeightsBegin, UpdateProgress)} does, and tells nobody
     * of its progress.
     *
     * @param tensors the file or directory
     * @param begin how to update
     * @return what came of the update
     * @throws IOException if a file cannot be read, or is no safetensors file; then nothing has changed
     * @throws IllegalArgumentException if begin has a source
     */
    public UpdateWeightsResponse updateWeights(Path tensors, UpdateWeightsBegin begin) throws IOException {
        return updateWeights(tensors, begin, (sent, total) -> {});
    }

    /**
     * Replaces the weights by those of files that the server reads itself.
     *
     * @param uri "file://" and a path below a directory that the server's operator allows
     * @param begin how to update, as for {@link #updateWeights(Path, UpdateWeightsBegin, UpdateProgress)}
     * @return what came of the update
     * @throws IllegalArgumentException if begin has a source
     */
    public UpdateWeightsResponse updateWeights(String uri, UpdateWeightsBegin begin) {
        return upload(begin).send(uri);
    }

    private WeightsUpload upload(UpdateWeightsBegin begin) {
        return new WeightsUpload(channel, new TensorStream(channel, maxMessageBytes, timeout), begin);
    }

    /**
     * Asks for the model served, the values in force and what the server can do.
     *
     * @param request what to include
     * @return the answer
     */
    public GetModelInfoResponse modelInfo(GetModelInfoRequest request) {
        return unary(ControlServiceGrpc.getGetModelInfoMethod(), request);
    }

    /**
     * Asks for the server's limits.
     *
     * @return the answer
     */
    public GetServerInfoResponse serverInfo() {
        return unary(ControlServiceGrpc.getGetServerInfoMethod(), GetServerInfoRequest.getDefaultInstance());
    }

    /**
     * Asks how busy the server is.
     *
     * @return the answer
     */
    public GetLoadResponse load() {
        return unary(ControlServiceGrpc.getGetLoadMethod(), GetLoadRequest.getDefaultInstance());
    }

    /**
     * Watches how busy the server is, until the stream is closed.
     *
     * @param request how often
     * @return a message at once, and one after each interval
     */
    public ServerStream<WatchLoadResponse> watchLoad(WatchLoadRequest request) {
        return streaming(ControlServiceGrpc.getWatchLoadMethod(), request);
    }

    /**
     * Asks for the tokens that the model would be given.
     *
     * @param request a text or a conversation
     * @return its tokens
     */
    public TokenizeResponse tokenize(TokenizeRequest request) {
        return unary(ControlServiceGrpc.getTokenizeMethod(), request);
    }

    /**
     * Asks for the text of tokens.
     *
     * @param request the tokens
     * @return their text
     */
    public DetokenizeResponse detokenize(DetokenizeRequest request) {
        return unary(ControlServiceGrpc.getDetokenizeMethod(), request);
    }

    /**
     * Asks for the bytes of the model's tokens, a page at a time.
     *
     * @param request the first token of the page
     * @return a page, and where the next one begins
     */
    public GetVocabularyResponse vocabulary(GetVocabularyRequest request) {
        return unary(ControlServiceGrpc.getGetVocabularyMethod(), request);
    }

    /**
     * Stops making tokens. New requests queue up.
     *
     * @param request what becomes of running requests
     * @return what became of them
     */
    public PauseResponse pause(PauseRequest request) {
        return unary(ControlServiceGrpc.getPauseMethod(), request);
    }

    /**
     * Ends a pause.
     *
     * @return the answer
     */
    public ResumeResponse resume() {
        return unary(ControlServiceGrpc.getResumeMethod(), ResumeRequest.getDefaultInstance());
    }

    /**
     * Swaps in an update that was sent with stage_only.
     *
     * @param request which one
     * @return what came of it
     */
    public CommitWeightsResponse commitWeights(CommitWeightsRequest request) {
        return unary(ControlServiceGrpc.getCommitWeightsMethod(), request);
    }

    /**
     * Drops a staged update.
     *
     * @param updateId which one
     * @return whether it was staged
     */
    public DiscardWeightsResponse discardWeights(String updateId) {
        return unary(
                ControlServiceGrpc.getDiscardWeightsMethod(),
                DiscardWeightsRequest.newBuilder().setUpdateId(updateId).build());
    }

    /**
     * Has the server read a LoRA adapter from its own disk.
     *
     * @param request which one
     * @return what the server has now
     */
    public LoadAdapterResponse loadAdapter(LoadAdapterRequest request) {
        return unary(ControlServiceGrpc.getLoadAdapterMethod(), request);
    }

    /**
     * Sends a LoRA adapter to the server, so that requests may ask for it by its name. The same adapter may be sent
     * again.
     *
     * @param folder what PEFT wrote, with adapter_config.json and adapter_model.safetensors
     * @param begin its name, and what becomes of another one of this name; config_json and manifest must be unset
     * @param progress is told after each piece
     * @return what the server has now
     * @throws IOException if a file cannot be read, or is no safetensors file; then nothing has changed
     * @throws IllegalArgumentException if begin has a config or a manifest
     */
    public PushAdapterResponse pushAdapter(Path folder, PushAdapterBegin begin, UpdateProgress progress)
            throws IOException {
        if (begin.hasManifest() || !begin.getConfigJson().isEmpty()) {
            throw new IllegalArgumentException("begin has a config or a manifest; leave both unset");
        }
        String config = Files.readString(folder.resolve("adapter_config.json"));
        return AdapterUpload.send(
                channel,
                new TensorStream(channel, maxMessageBytes, timeout),
                begin.toBuilder().setConfigJson(config).build(),
                SafetensorsFile.open(folder.resolve("adapter_model.safetensors")),
                progress);
    }

    /**
     * Drops a LoRA adapter. Requests that run on it finish.
     *
     * @param name which one
     * @return how many outputs still run on it
     */
    public UnloadAdapterResponse unloadAdapter(String name) {
        return unary(
                ControlServiceGrpc.getUnloadAdapterMethod(),
                UnloadAdapterRequest.newBuilder().setName(name).build());
    }

    /**
     * Lets a LoRA adapter keep its place on the device, or no longer.
     *
     * @param name which one
     * @param pinned whether it keeps its place
     * @return the adapter
     */
    public PinAdapterResponse pinAdapter(String name, boolean pinned) {
        return unary(
                ControlServiceGrpc.getPinAdapterMethod(),
                PinAdapterRequest.newBuilder().setName(name).setPinned(pinned).build());
    }

    /**
     * Asks for the LoRA adapters that the server has in memory and the caller may use.
     *
     * @return the adapters, in the order of their names
     */
    public ListAdaptersResponse listAdapters() {
        return unary(ControlServiceGrpc.getListAdaptersMethod(), ListAdaptersRequest.getDefaultInstance());
    }

    /**
     * Forgets all cached prefixes.
     *
     * @return how many pages that concerns
     */
    public FlushCacheResponse flushCache() {
        return unary(ControlServiceGrpc.getFlushCacheMethod(), FlushCacheRequest.getDefaultInstance());
    }

    /**
     * Changes how much is traced, or only asks.
     *
     * @param request the level; unset = change nothing
     * @return the level, and what became of the spans
     */
    public SetTracingResponse setTracing(SetTracingRequest request) {
        return unary(ControlServiceGrpc.getSetTracingMethod(), request);
    }

    /**
     * Records what the host and the device do during the next steps.
     *
     * @param request for how long
     * @return started, finished, and the files if they are asked for
     */
    public ServerStream<ProfileResponse> profile(ProfileRequest request) {
        return streaming(ControlServiceGrpc.getProfileMethod(), request);
    }

    /** Ends the connection, and with it all running calls. */
    @Override
    public void close() {
        managed.shutdownNow();
    }

    /**
     * Takes no new calls, lets the running ones finish, and then ends the connection.
     *
     * @param patience for how long; then the remaining calls are cancelled
     * @return whether all calls finished
     * @throws InterruptedException if the thread is interrupted; the connection is ended then, too
     */
    public boolean shutdown(Duration patience) throws InterruptedException {
        try {
            return managed.shutdown().awaitTermination(Timeouts.nanos(patience), TimeUnit.NANOSECONDS);
        } finally {
            managed.shutdownNow();
        }
    }

    private <Q extends Message, A extends Message> A unary(MethodDescriptor<Q, A> method, Q request) {
        CallOptions options = Timeouts.options(method, timeout);
        Attempts attempts = Attempts.at(retries, Optional.ofNullable(options.getDeadline()));
        while (true) {
            try {
                return ClientCalls.blockingUnaryCall(channel, method, options, request);
            } catch (StatusRuntimeException error) {
                PenstockException failure = PenstockException.from(error);
                try {
                    Thread.sleep(attempts.delayAfter(failure).orElseThrow(() -> failure).toMillis());
                } catch (InterruptedException interrupted) {
                    Thread.currentThread().interrupt();
                    throw failure;
                }
            }
        }
    }

    private <Q extends Message, A extends Message> ServerStream<A> streaming(MethodDescriptor<Q, A> method, Q request) {
        CallOptions options = Timeouts.options(method, timeout);
        Attempts attempts = Attempts.at(retries, Optional.ofNullable(options.getDeadline()));
        return ServerStream.start(channel, method, options, request, attempts);
    }
}
