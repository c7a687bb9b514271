package org.edgefl;

/** Is told what an agent does. What it throws goes to the handler of uncaught exceptions, and the agent goes on. */
@FunctionalInterface
public interface Listener {
    void onEvent(Event event);
}
