package org.edgefl;

/** Something that people or the app may want to know. */
public final class Event {
    private final String name;
    private final String text;
    private final String json;

    Event(String name, String text, String json) {
        this.name = name;
        this.text = text;
        this.json = json;
    }

    /** {@code online}, {@code round}, {@code accepted}, {@code declined}, {@code failed}, ... */
    public String name() {
        return name;
    }

    /** For people. */
    public String text() {
        return text;
    }

    /** {@code {"event": ..., "text": ..., "details": {...}}}. */
    public String json() {
        return json;
    }

    @Override
    public String toString() {
        return name + ": " + text;
    }
}
