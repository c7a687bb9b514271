package org.edgefl;

/** What the owner of a device allows, and what the device is like now. Each method gives another one. */
public final class Constraints {
    /** All is allowed, nothing is known. */
    public static final Constraints NONE = new Constraints(1.0, true, null, null, null, null);

    final double duty;
    final boolean allowed;
    final String reason;
    final String power;
    final String link;
    final String thermal;

    private Constraints(double duty, boolean allowed, String reason, String power, String link, String thermal) {
        this.duty = duty;
        this.allowed = allowed;
        this.reason = reason;
        this.power = power;
        this.link = link;
        this.thermal = thermal;
    }

    /** Share of the time in which steps are made, above 0 to 1; rests are between steps. */
    public Constraints duty(double share) {
        return new Constraints(share, allowed, reason, power, link, thermal);
    }

    /** This device does not train now; a round in hand is declined. {@code why} is for people. */
    public Constraints forbidden(String why) {
        return new Constraints(duty, false, why, power, link, thermal);
    }

    /** {@code charging} or {@code battery}. The server selects by this and the next two. */
    public Constraints power(String now) {
        return new Constraints(duty, allowed, reason, now, link, thermal);
    }

    /** {@code unmetered} or {@code metered}. */
    public Constraints link(String now) {
        return new Constraints(duty, allowed, reason, power, now, thermal);
    }

    /** {@code cool}, {@code warm} or {@code hot}. */
    public Constraints thermal(String now) {
        return new Constraints(duty, allowed, reason, power, link, now);
    }
}
