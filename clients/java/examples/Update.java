import java.io.IOException;
import java.nio.file.Path;
import java.util.Map;
import penstock.client.PenstockClient;
import penstock.client.PenstockException;
import penstock.client.RefusedException;
import penstock.v1.TensorError;
import penstock.v1.UpdateWeightsBegin;
import penstock.v1.UpdateWeightsResponse;

/** Sends new weights to a server that goes on serving. */
public final class Update {
    private static final Map<String, String> OPTIONS =
            Map.of("label", "the version_label of the new weights; otherwise new");

    private Update() {}

    public static void main(String[] arguments) throws IOException {
        Arguments given = Arguments.of("Update FILE_OR_FOLDER", OPTIONS, arguments);
        if (given.words().size() != 1) {
            throw given.refused("there must be one file or folder");
        }
        UpdateWeightsBegin begin = UpdateWeightsBegin.newBuilder()
                .setVersionLabel(given.option("label").orElse("new"))
                .build();
        try (PenstockClient client = given.client().build()) {
            UpdateWeightsResponse reply = client.updateWeights(
                    Path.of(given.words().get(0)),
                    begin,
                    (sent, total) -> System.out.printf("\r%d of %d bytes", sent, total));
            System.out.printf(
                    "%n%s: \"%s\" serves as generation %d; %d tensors%n",
                    reply.getOutcome(),
                    reply.getCurrent().getLabel(),
                    reply.getCurrent().getGeneration(),
                    reply.getTensorsUpdated());
        } catch (RefusedException.TensorsRefused error) {
            for (TensorError tensor : error.tensorErrors()) {
                System.err.println(tensor.getName() + ": " + tensor.getReason());
            }
            System.exit(1);
        } catch (PenstockException error) {
            System.err.println("the update " + error.updateId() + " failed: " + error.getMessage());
            System.exit(1);
        }
    }
}
