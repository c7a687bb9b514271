import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.edgefl.Agent;
import org.edgefl.Constraints;
import org.edgefl.DataSource;
import org.edgefl.EdgeflException;

/** A device in a JVM: MODE ID BROKER FEDERATION FOLDER ENGINE X Y, with samples and labels as raw bytes. Events are JSON lines. */
public final class Device {
    private static final int PIXELS = 64;

    /** Rows of uint8 images (1, 8, 8) and int64 labels. */
    private static final class Digits extends DataSource {
        private final byte[] x;
        private final byte[] y;
        private final boolean broken;

        Digits(byte[] x, byte[] y, boolean broken) {
            super("digits", y.length / Long.BYTES);
            this.x = x;
            this.y = y;
            this.broken = broken;
            array("x", "uint8", 1, 8, 8);
            array("y", "int64");
        }

        @Override
        protected void read(int array, long row, ByteBuffer into) throws IOException {
            if (broken) {
                throw new IOException("the camera roll is locked \uD83D\uDD12");
            }
            int size = array == 0 ? PIXELS : Long.BYTES;
            into.put(array == 0 ? x : y, (int) row * size, size);
        }
    }

    public static void main(String[] words) throws Exception {
        String mode = words[0];
        Agent.Builder builder = Agent.builder().device(words[1]).broker(words[2]).federation(words[3]).folder(words[4])
                .engine(words[5]).data(digits(words, mode));
        Agent[] made = new Agent[1];
        builder.listener(event -> {
            System.out.println(event.json());
            if (mode.equals("within") && event.name().equals("online")) {
                callWithin(made[0]);
            }
            if (mode.equals("within")) {
                throw new IllegalStateException("a listener's own fault");
            }
        });
        if (mode.equals("refused")) {
            refused(builder);
            return;
        }
        try (Agent agent = builder.build()) {
            made[0] = agent;
            if (mode.equals("start")) {
                agent.start();
                waitUntilDone(agent);
            } else {
                while (!agent.step(200).done()) {
                    // Each step serves for a while, as a job of a scheduler does.
                }
            }
            System.err.println("stopped: " + agent.stop(5000));
        }
    }

    private static Digits digits(String[] words, String mode) throws IOException {
        return new Digits(Files.readAllBytes(Path.of(words[6])), Files.readAllBytes(Path.of(words[7])), mode.equals("broken"));
    }

    private static void waitUntilDone(Agent agent) throws InterruptedException {
        CountDownLatch never = new CountDownLatch(1);
        while (!agent.state().done()) {
            never.await(100, TimeUnit.MILLISECONDS);
        }
    }

    private static void callWithin(Agent agent) {
        agent.pause(true);
        agent.setConstraints(Constraints.NONE.duty(0.9).power("charging").link("unmetered").thermal("cool"));
        agent.pause(false);
        for (Runnable call : new Runnable[] {agent::close, agent::state, () -> agent.stop(1)}) {
            try {
                call.run();
                System.err.println("not refused");
            } catch (IllegalStateException refused) {
                System.err.println("refused: " + refused.getMessage());
            }
        }
    }

    /** What an agent says of options that cannot be used, and after its end. */
    private static void refused(Agent.Builder builder) {
        told(() -> Agent.builder().federation("demo").device("d").broker("localhost").build());
        told(() -> builder.limit("no=such-limit").build());
        told(() -> Agent.builder().federation("demo").device("d").broker("localhost").folder("f").mirror("ftp://m").ownMirrorsOnly(true).build());
        told(() -> Agent.builder().federation("demo").device("\uD83D\uDE00/d").broker("localhost").folder("f").build());
        told(() -> Agent.builder().federation("demo").device("d").broker("localhost").folder("/proc/none").build());
    }

    private static void told(Runnable call) {
        try {
            call.run();
            System.err.println("not refused");
        } catch (EdgeflException error) {
            System.err.println(error.code() + ": " + error.getMessage());
        }
    }
}
