package penstock.conformance;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.TypeRegistry;
import com.google.protobuf.util.JsonFormat;
import com.google.rpc.ErrorDetailsProto;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.PrototypeMarshaller;
import io.grpc.ServiceDescriptor;
import io.grpc.Status;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.protobuf.StatusProto;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import penstock.v1.ControlServiceGrpc;
import penstock.v1.InferenceServiceGrpc;
import penstock.v1.WeightsProto;

/** Makes calls by the generated descriptors, from requests in JSON to replies in JSON. */
final class Calls {
    private static final double DEFAULT_TIMEOUT_SECONDS = 60;
    private static final TypeRegistry DETAILS = TypeRegistry.newBuilder()
            .add(ErrorDetailsProto.getDescriptor().getMessageTypes())
            .add(WeightsProto.getDescriptor().getMessageTypes())
            .build();
    private static final JsonFormat.Printer PRINTER = JsonFormat.printer().usingTypeRegistry(DETAILS);
    private static final Gson LINES =
            new GsonBuilder().disableHtmlEscaping().serializeNulls().create();

    private final Channel channel;

    Calls(Channel channel) {
        this.channel = channel;
    }

    /** Makes one call and returns the line to print. */
    String make(Main.Case one) throws Exception {
        MethodDescriptor<Message, Message> method = find(one.method());
        List<Message> requests = new ArrayList<>();
        for (JsonElement request : one.requests()) {
            requests.add(parse(method, request));
        }
        Outcome outcome = new Outcome();
        long micros = Math.round(one.timeoutSeconds().orElse(DEFAULT_TIMEOUT_SECONDS) * 1e6);
        ClientCall<Message, Message> call =
                channel.newCall(method, CallOptions.DEFAULT.withDeadlineAfter(micros, TimeUnit.MICROSECONDS));
        call.start(outcome, metadata(one));
        call.request(Integer.MAX_VALUE);
        requests.forEach(call::sendMessage);
        call.halfClose();
        return LINES.toJson(line(one.name(), outcome));
    }

    @SuppressWarnings("unchecked") // all messages of the services are protobuf's
    private static MethodDescriptor<Message, Message> find(String path) {
        return Stream.of(
                        InferenceServiceGrpc.getServiceDescriptor(),
                        ControlServiceGrpc.getServiceDescriptor(),
                        HealthGrpc.getServiceDescriptor())
                .map(ServiceDescriptor::getMethods)
                .flatMap(methods -> methods.stream())
                .filter(method -> method.getFullMethodName().equals(path))
                .map(method -> (MethodDescriptor<Message, Message>) method)
                .findFirst()
                .orElseThrow(() -> new IllegalArgumentException("no method \"" + path + "\""));
    }

    private static Message parse(MethodDescriptor<Message, Message> method, JsonElement request)
            throws InvalidProtocolBufferException {
        PrototypeMarshaller<Message> marshaller = (PrototypeMarshaller<Message>) method.getRequestMarshaller();
        Message.Builder builder = marshaller.getMessagePrototype().newBuilderForType();
        JsonFormat.parser().merge(request.toString(), builder);
        return builder.build();
    }

    private static Metadata metadata(Main.Case one) {
        Metadata found = new Metadata();
        one.metadata().forEach((key, value) ->
                found.put(Metadata.Key.of(key, Metadata.ASCII_STRING_MARSHALLER), value));
        return found;
    }

    private static JsonObject line(String name, Outcome outcome)
            throws InvalidProtocolBufferException, ExecutionException, InterruptedException {
        Status status = outcome.ended.get();
        JsonArray messages = new JsonArray();
        for (Message message : outcome.messages) {
            messages.add(json(message));
        }
        JsonArray details = new JsonArray();
        com.google.rpc.Status packed = StatusProto.fromStatusAndTrailers(status, outcome.trailers);
        for (Any detail : packed.getDetailsList()) {
            details.add(json(detail));
        }
        JsonObject ending = new JsonObject();
        ending.addProperty("code", status.getCode().name());
        ending.addProperty("message", status.getDescription() == null ? "" : status.getDescription());
        ending.add("details", details);
        JsonObject line = new JsonObject();
        line.addProperty("name", name);
        line.add("messages", messages);
        line.add("status", ending);
        return line;
    }

    private static JsonElement json(Message message) throws InvalidProtocolBufferException {
        return JsonParser.parseString(PRINTER.print(message));
    }

    /** Gathers what comes. */
    private static final class Outcome extends ClientCall.Listener<Message> {
        final List<Message> messages = new ArrayList<>();
        final CompletableFuture<Status> ended = new CompletableFuture<>();
        volatile Metadata trailers;

        @Override
        public void onMessage(Message message) {
            messages.add(message);
        }

        @Override
        public void onClose(Status status, Metadata with) {
            trailers = with;
            ended.complete(status);
        }
    }
}
