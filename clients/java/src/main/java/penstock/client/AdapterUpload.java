package penstock.client;

import io.grpc.Channel;
import io.grpc.StatusRuntimeException;
import java.io.IOException;
import java.util.List;
import penstock.client.SafetensorsFile.Tensor;
import penstock.v1.ControlServiceGrpc;
import penstock.v1.PushAdapterBegin;
import penstock.v1.PushAdapterCommit;
import penstock.v1.PushAdapterRequest;
import penstock.v1.PushAdapterResponse;

/** One adapter that is sent: begin with the manifest, the bytes of all tensors in chunks, and the commit. */
final class AdapterUpload {
    private AdapterUpload() {}

    static PushAdapterResponse send(
            Channel channel, TensorStream stream, PushAdapterBegin begin, List<Tensor> tensors, UpdateProgress progress)
            throws IOException {
        try {
            PushAdapterBegin whole =
                    begin.toBuilder().setManifest(stream.manifest(tensors, true)).build();
            int chunkBytes = stream.chunkBytes();
            try (ClientStream<PushAdapterRequest, PushAdapterResponse> call =
                    ClientStream.start(channel, ControlServiceGrpc.getPushAdapterMethod(), stream.options())) {
                if (call.send(step().setBegin(whole).build())
                        && TensorStream.sendAll(
                                tensors, chunkBytes, chunk -> call.send(step().setChunk(chunk).build()), progress)) {
                    long total = TensorStream.totalBytes(tensors);
                    call.send(step().setCommit(PushAdapterCommit.newBuilder().setTotalBytes(total))
                            .build());
                    call.halfClose();
                }
                return call.response();
            }
        } catch (StatusRuntimeException error) {
            throw ErrorTable.exception(error, false, "");
        }
    }

    private static PushAdapterRequest.Builder step() {
        return PushAdapterRequest.newBuilder();
    }
}
