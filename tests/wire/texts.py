"""Characters that texts of strangers are made of."""

LETTERS = "aZ09._-:@/+#$[]%\\ \t\n\0\x7f\u00e9\u0130\u2028\u20ac\ufeff\uffff\U0001f600"
"""Each kind once: what topics and addresses give a meaning, controls, one to four bytes of UTF-8, marks nobody sees."""
