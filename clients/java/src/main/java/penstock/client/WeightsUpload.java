package penstock.client;

import io.grpc.Channel;
import io.grpc.StatusRuntimeException;
import java.io.IOException;
import java.util.List;
import java.util.UUID;
import penstock.client.SafetensorsFile.Tensor;
import penstock.v1.InferenceServiceGrpc;
import penstock.v1.UpdateWeightsBegin;
import penstock.v1.UpdateWeightsCommit;
import penstock.v1.UpdateWeightsRequest;
import penstock.v1.UpdateWeightsResponse;

/** One weight update: begin with the manifest, the bytes of all tensors in chunks, and the commit. */
final class WeightsUpload {
    private final Channel channel;
    private final TensorStream stream;
    private final UpdateWeightsBegin begin;

    WeightsUpload(Channel channel, TensorStream stream, UpdateWeightsBegin begin) {
        if (begin.getSourceCase() != UpdateWeightsBegin.SourceCase.SOURCE_NOT_SET) {
            throw new IllegalArgumentException("begin has a source; leave manifest and uri unset");
        }
        this.channel = channel;
        this.stream = stream;
        this.begin = begin.getUpdateId().isEmpty()
                ? begin.toBuilder().setUpdateId(UUID.randomUUID().toString()).build()
                : begin;
    }

    /** Sends the tensors. */
    UpdateWeightsResponse send(List<Tensor> tensors, UpdateProgress progress) throws IOException {
        List<Tensor> sent = begin.getValidateOnly() ? List.of() : tensors;
        try {
            UpdateWeightsBegin whole = begin.toBuilder()
                    .setManifest(stream.manifest(tensors, !begin.getValidateOnly()))
                    .build();
            int chunkBytes = sent.isEmpty() ? 1 : stream.chunkBytes();
            try (ClientStream<UpdateWeightsRequest, UpdateWeightsResponse> call = start()) {
                if (call.send(step().setBegin(whole).build())
                        && TensorStream.sendAll(
                                sent, chunkBytes, chunk -> call.send(step().setChunk(chunk).build()), progress)) {
                    call.send(commit(TensorStream.totalBytes(sent)));
                    call.halfClose();
                }
                return call.response();
            }
        } catch (StatusRuntimeException error) {
            throw ErrorTable.exception(error, false, begin.getUpdateId());
        }
    }

    /** Has the server read files. */
    UpdateWeightsResponse send(String uri) {
        try (ClientStream<UpdateWeightsRequest, UpdateWeightsResponse> call = start()) {
            call.send(step().setBegin(begin.toBuilder().setUri(uri)).build());
            call.send(commit(0));
            call.halfClose();
            return call.response();
        } catch (StatusRuntimeException error) {
            throw ErrorTable.exception(error, false, begin.getUpdateId());
        }
    }

    private ClientStream<UpdateWeightsRequest, UpdateWeightsResponse> start() {
        return ClientStream.start(channel, InferenceServiceGrpc.getUpdateWeightsMethod(), stream.options());
    }

    private static UpdateWeightsRequest commit(long totalBytes) {
        return step().setCommit(UpdateWeightsCommit.newBuilder().setTotalBytes(totalBytes)).build();
    }

    private static UpdateWeightsRequest.Builder step() {
        return UpdateWeightsRequest.newBuilder();
    }
}
