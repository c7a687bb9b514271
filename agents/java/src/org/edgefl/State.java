package org.edgefl;

/** What an agent is doing. */
public final class State {
    private final int bits;

    State(int bits) {
        this.bits = bits;
    }

    /** To the broker. */
    public boolean connected() {
        return (bits & 1) != 0;
    }

    /** On a round. */
    public boolean working() {
        return (bits & 2) != 0;
    }

    public boolean paused() {
        return (bits & 4) != 0;
    }

    /** The training is over, and nothing waits to be sent. */
    public boolean done() {
        return (bits & 8) != 0;
    }

    @Override
    public String toString() {
        return "State(connected=" + connected() + ", working=" + working() + ", paused=" + paused() + ", done=" + done() + ")";
    }
}
