package org.edgefl;

import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.locks.ReadWriteLock;
import java.util.concurrent.locks.ReentrantReadWriteLock;

/**
 * A device of a federation, embedded in an app.
 *
 * <pre>{@code
 * try (Agent agent = Agent.builder()
 *         .federation("demo").device("phone-7").broker("mqtts://broker.example:8883")
 *         .folder(folder).data(photos).listener(event -> log(event.text()))
 *         .build()) {
 *     while (!stopped && !agent.step(1000).done()) { }
 *     agent.stop(2000);
 * }
 * }</pre>
 *
 * <p>Every method may be called from any thread. {@link #pause} and {@link #setConstraints} never wait for another one and may be
 * called within an event, the others may not. {@link #stop} ends a {@link #step} of another thread. What goes wrong is an {@link EdgeflException}. Whatever ends the process, nothing is
 * lost: what was computed waits in the folder, which one process at a time may have.
 */
public final class Agent implements AutoCloseable {
    private static final int STOP_MS = 1000;

    private final Object calls = new Object();
    private final ReadWriteLock alive = new ReentrantReadWriteLock();
    private final ThreadLocal<Boolean> inEvent = ThreadLocal.withInitial(() -> false);
    private final Listener listener;
    private long handle;

    private Agent(Builder from) {
        listener = from.listener;
        handle = Native.create(from.texts(), from.insecurePassword, from.memoryBytes, from.threads, Native.utf8(from.limits),
                Native.utf8(from.mirrors), from.ownMirrorsOnly);
        try {
            if (listener != null) {
                Native.setEvents(handle, this);
            }
            if (from.source != null) {
                from.source.give(handle);
            } else if (from.dataPath != null) {
                Native.setDataPath(handle, Native.utf8(from.dataPath), from.skipBadRows);
            }
        } catch (RuntimeException error) {
            Native.destroy(handle);
            throw error;
        }
    }

    public static Builder builder() {
        return new Builder();
    }

    /** Of the native library. */
    public static String version() {
        return Native.text(Native.version());
    }

    /** Connects and takes part, on a thread of its own; returns at once. */
    public void start() {
        synchronized (calls) {
            Native.start(open());
        }
    }

    /** The same on this thread, for about so many milliseconds: for a job that is given its time in pieces. */
    public State step(int waitMs) {
        synchronized (calls) {
            return new State(Native.step(open(), waitMs));
        }
    }

    public State state() {
        synchronized (calls) {
            return new State(Native.state(open()));
        }
    }

    /** {@code on}: no step is begun until it is called with false; the connection stays. */
    public void pause(boolean on) {
        alive.readLock().lock();
        try {
            Native.pause(existing(), on);
        } finally {
            alive.readLock().unlock();
        }
    }

    /** What the owner of the device allows now. */
    public void setConstraints(Constraints now) {
        alive.readLock().lock();
        try {
            Native.setConstraints(existing(), now.duty, now.allowed, Native.utf8(now.reason), Native.utf8(now.power),
                    Native.utf8(now.link), Native.utf8(now.thermal));
        } finally {
            alive.readLock().unlock();
        }
    }

    /**
     * Leaves in good order: a round in hand stops before its next step, which is kept.
     *
     * @return whether it has stopped; if not, a step is still being made: call it again, or end the process. A stopped agent does
     *     not start again.
     */
    public boolean stop(int withinMs) {
        alive.readLock().lock();
        try {
            return Native.stop(open(), withinMs);
        } finally {
            alive.readLock().unlock();
        }
    }

    /** Stops, waits for the step that is being made, and frees the agent. The second call does nothing. */
    @Override
    public void close() {
        refuseInEvent();
        synchronized (calls) {
            if (handle == 0) {
                return;
            }
            while (!Native.stop(handle, STOP_MS)) {
                // A step takes as long as it takes; without it nothing can be freed.
            }
            alive.writeLock().lock();
            try {
                Native.destroy(handle);
                handle = 0;
            } finally {
                alive.writeLock().unlock();
            }
        }
    }

    /** Called by the native library, on its threads. */
    void told(byte[] event, byte[] text, byte[] json) {
        inEvent.set(true);
        try {
            listener.onEvent(new Event(Native.text(event), Native.text(text), Native.text(json)));
        } finally {
            inEvent.set(false);
        }
    }

    private long open() {
        refuseInEvent();
        return existing();
    }

    private long existing() {
        if (handle == 0) {
            throw new IllegalStateException("the agent is closed: build another one");
        }
        return handle;
    }

    private void refuseInEvent() {
        if (inEvent.get()) {
            throw new IllegalStateException("only pause and setConstraints may be called within an event");
        }
    }

    /** What an agent is. Federation, device, broker and folder are required. */
    public static final class Builder {
        private String federation;
        private String device;
        private String broker;
        private String folder;
        private String engine;
        private String tier;
        private String serverKeys;
        private String token;
        private String password;
        private String caFile;
        private String certFile;
        private String keyFile;
        private boolean insecurePassword;
        private long memoryBytes;
        private int threads;
        private final List<String> limits = new ArrayList<>();
        private final List<String> mirrors = new ArrayList<>();
        private boolean ownMirrorsOnly;
        private DataSource source;
        private String dataPath;
        private boolean skipBadRows;
        private Listener listener;

        private Builder() {}

        public Builder federation(String name) {
            federation = name;
            return this;
        }

        /** Its name, stable over restarts. */
        public Builder device(String name) {
            device = name;
            return this;
        }

        /** {@code host:port}, or {@code mqtts://user@host:port}. */
        public Builder broker(String address) {
            broker = address;
            return this;
        }

        /** What the device keeps: on Android below {@code Context.getNoBackupFilesDir()}. */
        public Builder folder(String path) {
            folder = path;
            return this;
        }

        /** {@code onnx} or {@code executorch}; by default the first that is built in. */
        public Builder engine(String name) {
            engine = name;
            return this;
        }

        /** To ask for; by default the server decides. */
        public Builder tier(String name) {
            tier = name;
            return this;
        }

        /** 64 hexadecimal digits, several with commas; by default the first key that is seen is trusted. */
        public Builder serverKeys(String keys) {
            serverKeys = keys;
            return this;
        }

        /** A one-time token of {@code edgefl enroll token}. */
        public Builder token(String text) {
            token = text;
            return this;
        }

        /** Of the broker's user. */
        public Builder password(String text) {
            password = text;
            return this;
        }

        /** The password may travel without TLS. */
        public Builder insecurePassword(boolean allowed) {
            insecurePassword = allowed;
            return this;
        }

        /** PEM, of the broker's authority; switches TLS on. */
        public Builder caFile(String path) {
            caFile = path;
            return this;
        }

        /** PEM: a client certificate and its key. */
        public Builder clientCertificate(String certificate, String key) {
            certFile = certificate;
            keyFile = key;
            return this;
        }

        /** What this device offers to training; 0: what it has. */
        public Builder memoryBytes(long count) {
            memoryBytes = count;
            return this;
        }

        /** Of the engine; 0: one. */
        public Builder threads(int count) {
            threads = count;
            return this;
        }

        /** {@code fetch_window=4} and the like: those of {@code edgefl device --limit}. */
        public Builder limit(String keyAndValue) {
            limits.add(keyAndValue);
            return this;
        }

        /** A URL below which blobs lie too, asked before those that the server names, and the broker. */
        public Builder mirror(String url) {
            mirrors.add(url);
            return this;
        }

        /** No mirror that the server names is asked. */
        public Builder ownMirrorsOnly(boolean only) {
            ownMirrorsOnly = only;
            return this;
        }

        /** Local data by callbacks. */
        public Builder data(DataSource from) {
            source = Objects.requireNonNull(from);
            dataPath = null;
            return this;
        }

        /** Local data in a file or folder: npz, npy, idx, images by class. {@code skip}: rows that cannot be read are left out. */
        public Builder dataPath(String path, boolean skip) {
            dataPath = Objects.requireNonNull(path);
            skipBadRows = skip;
            source = null;
            return this;
        }

        /** Is told what happens, on threads of the agent, one event at a time; it must return soon. */
        public Builder listener(Listener toTell) {
            listener = toTell;
            return this;
        }

        /** Opens the folder and checks all this; connects to nothing yet. */
        public Agent build() {
            return new Agent(this);
        }

        /** In the order in which the native half reads them. */
        private byte[][] texts() {
            String[] all = {federation, device, broker, folder, engine, tier, serverKeys, token, password, caFile, certFile, keyFile};
            byte[][] encoded = new byte[all.length][];
            for (int at = 0; at < all.length; at++) {
                encoded[at] = Native.utf8(all[at]);
            }
            return encoded;
        }
    }
}
