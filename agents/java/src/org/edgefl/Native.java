package org.edgefl;

import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;

/** The native library, {@code libedgefl_jni}. Texts travel as UTF-8 with a zero behind. What fails is an EdgeflException. */
final class Native {
    static {
        System.loadLibrary("edgefl_jni");
    }

    private Native() {}

    static native long create(
            byte[][] texts, boolean insecurePassword, long memoryBytes, int threads, byte[][] limits, byte[][] mirrors,
            boolean ownMirrorsOnly);

    static native void destroy(long handle);

    static native void setEvents(long handle, Agent toTell);

    static native void setDataPath(long handle, byte[] path, boolean skipBadRows);

    static native void setData(
            long handle, byte[] name, long rows, byte[][] arrays, byte[][] types, long[][] shapes, DataSource source);

    static native void setConstraints(
            long handle, double duty, boolean allowed, byte[] reason, byte[] power, byte[] link, byte[] thermal);

    static native void start(long handle);

    static native int step(long handle, int waitMs);

    static native int state(long handle);

    static native void pause(long handle, boolean on);

    static native boolean stop(long handle, int withinMs);

    static native byte[] version();

    static byte[] utf8(String text) {
        if (text == null) {
            return null;
        }
        byte[] plain = text.getBytes(StandardCharsets.UTF_8);
        return Arrays.copyOf(plain, plain.length + 1);
    }

    static byte[][] utf8(List<String> texts) {
        byte[][] all = new byte[texts.size()][];
        for (int at = 0; at < all.length; at++) {
            all[at] = utf8(texts.get(at));
        }
        return all;
    }

    static String text(byte[] utf8) {
        return new String(utf8, StandardCharsets.UTF_8);
    }
}
