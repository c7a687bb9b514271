package org.edgefl;

/** What an agent cannot do, and what to do about it. */
public final class EdgeflException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    /** What went wrong, as {@code edgefl_status} numbers it. */
    public enum Code {
        ARGUMENT(1),
        CONFIG(2),
        DATA(3),
        STATE(4),
        BROKER(7),
        STORE(11),
        INTERNAL(99);

        private final int number;

        Code(int number) {
            this.number = number;
        }

        private static Code of(int number) {
            for (Code code : values()) {
                if (code.number == number) {
                    return code;
                }
            }
            return INTERNAL;
        }
    }

    private final Code code;

    /** Called by the native library. */
    EdgeflException(int number, byte[] message) {
        super(Native.text(message));
        code = Code.of(number);
    }

    public Code code() {
        return code;
    }
}
