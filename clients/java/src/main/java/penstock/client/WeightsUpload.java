package penstock.client;

import com.google.protobuf.ByteString;
import com.google.protobuf.UnsafeByteOperations;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCalls;
import java.io.IOException;
import java.nio.channels.FileChannel;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.zip.CRC32C;
import penstock.client.SafetensorsFile.Tensor;
import penstock.v1.ControlServiceGrpc;
import penstock.v1.GetServerInfoRequest;
import penstock.v1.InferenceServiceGrpc;
import penstock.v1.TensorChunk;
import penstock.v1.TensorManifest;
import penstock.v1.TensorSpec;
import penstock.v1.UpdateWeightsBegin;
import penstock.v1.UpdateWeightsCommit;
import penstock.v1.UpdateWeightsRequest;
import penstock.v1.UpdateWeightsResponse;

/** One weight update: the manifest with the checksums of all tensors, their bytes in chunks, and the commit. */
final class WeightsUpload {
    /** A server may take larger chunks, but that would only cost memory. */
    private static final int MOST_CHUNK_BYTES = 8 << 20;

    private static final int PIECE_BYTES = 1 << 20;
    /** What the message of a chunk has besides the tensor's bytes, at most. */
    private static final int CHUNK_OVERHEAD_BYTES = 64;

    private final Channel channel;
    private final int mostChunkBytes;
    private final Optional<Deadline> deadline;
    private final UpdateWeightsBegin begin;

    /** The timeout begins now, and bounds the whole update with the reading of files. */
    WeightsUpload(Channel channel, int maxMessageBytes, Optional<Duration> timeout, UpdateWeightsBegin begin) {
        if (begin.getSourceCase() != UpdateWeightsBegin.SourceCase.SOURCE_NOT_SET) {
            throw new IllegalArgumentException("begin has a source; leave manifest and uri unset");
        }
        this.channel = channel;
        this.mostChunkBytes = Math.min(MOST_CHUNK_BYTES, Math.max(maxMessageBytes - CHUNK_OVERHEAD_BYTES, 1));
        this.deadline = timeout.map(time -> Deadline.after(Timeouts.nanos(time), TimeUnit.NANOSECONDS));
        this.begin = begin.getUpdateId().isEmpty()
                ? begin.toBuilder().setUpdateId(UUID.randomUUID().toString()).build()
                : begin;
    }

    /** Sends the tensors. */
    UpdateWeightsResponse send(List<Tensor> tensors, UpdateProgress progress) throws IOException {
        List<Tensor> sent = begin.getValidateOnly() ? List.of() : tensors;
        try {
            UpdateWeightsBegin whole = begin.toBuilder().setManifest(manifest(tensors)).build();
            int chunkBytes = sent.isEmpty() ? mostChunkBytes : chunkBytes();
            try (ClientStream<UpdateWeightsRequest, UpdateWeightsResponse> call = start()) {
                if (call.send(step().setBegin(whole).build()) && sendAll(call, sent, chunkBytes, progress)) {
                    call.send(commit(totalBytes(sent)));
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

    private TensorManifest manifest(List<Tensor> tensors) throws IOException {
        TensorManifest.Builder manifest = TensorManifest.newBuilder();
        for (Tensor tensor : tensors) {
            TensorSpec.Builder spec = manifest.addTensorsBuilder()
                    .setName(tensor.name())
                    .setDtype(tensor.dtype())
                    .addAllShape(tensor.shape());
            if (!begin.getValidateOnly()) {
                spec.setCrc32C(checksum(tensor));
            }
        }
        return manifest.build();
    }

    private ClientStream<UpdateWeightsRequest, UpdateWeightsResponse> start() {
        CallOptions options = deadline.map(CallOptions.DEFAULT::withDeadline).orElse(CallOptions.DEFAULT);
        return ClientStream.start(channel, InferenceServiceGrpc.getUpdateWeightsMethod(), options);
    }

    private int chunkBytes() {
        var method = ControlServiceGrpc.getGetServerInfoMethod();
        CallOptions options = deadline.map(CallOptions.DEFAULT::withDeadline)
                .orElseGet(() -> Timeouts.options(method, Optional.empty()));
        int most = ClientCalls.blockingUnaryCall(channel, method, options, GetServerInfoRequest.getDefaultInstance())
                .getMaxChunkBytes();
        // It is 0 for a server that takes no updates, which says so itself when one begins; uint32 may look negative.
        return most <= 0 ? mostChunkBytes : Math.min(most, mostChunkBytes);
    }

    /** Sends the chunks of all tensors. Returns false if the server has answered before it had them. */
    private static boolean sendAll(
            ClientStream<UpdateWeightsRequest, UpdateWeightsResponse> call,
            List<Tensor> tensors,
            int chunkBytes,
            UpdateProgress progress)
            throws IOException {
        long total = totalBytes(tensors);
        long sent = 0;
        for (int index = 0; index < tensors.size(); index++) {
            Tensor tensor = tensors.get(index);
            try (FileChannel file = FileChannel.open(tensor.file())) {
                for (long offset = 0; offset < tensor.numBytes(); offset += chunkBytes) {
                    byte[] bytes = new byte[(int) Math.min(chunkBytes, tensor.numBytes() - offset)];
                    tensor.read(file, offset, bytes);
                    ByteString data = UnsafeByteOperations.unsafeWrap(bytes); // nobody changes these bytes any more
                    TensorChunk.Builder chunk =
                            TensorChunk.newBuilder().setTensorIndex(index).setOffset(offset).setData(data);
                    if (!call.send(step().setChunk(chunk).build())) {
                        return false;
                    }
                    sent += bytes.length;
                    progress.sent(sent, total);
                }
            }
        }
        return true;
    }

    private int checksum(Tensor tensor) throws IOException {
        CRC32C crc = new CRC32C();
        try (FileChannel file = FileChannel.open(tensor.file())) {
            for (long offset = 0; offset < tensor.numBytes(); offset += PIECE_BYTES) {
                if (deadline.map(Deadline::isExpired).orElse(false)) {
                    throw Status.DEADLINE_EXCEEDED
                            .withDescription("the timeout passed while tensors were read for their checksums")
                            .asRuntimeException();
                }
                byte[] bytes = new byte[(int) Math.min(PIECE_BYTES, tensor.numBytes() - offset)];
                tensor.read(file, offset, bytes);
                crc.update(bytes, 0, bytes.length);
            }
        }
        return (int) crc.getValue();
    }

    private static long totalBytes(List<Tensor> tensors) {
        return tensors.stream().mapToLong(Tensor::numBytes).sum();
    }

    private static UpdateWeightsRequest commit(long totalBytes) {
        return step().setCommit(UpdateWeightsCommit.newBuilder().setTotalBytes(totalBytes)).build();
    }

    private static UpdateWeightsRequest.Builder step() {
        return UpdateWeightsRequest.newBuilder();
    }
}
