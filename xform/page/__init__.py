"""The HTML pages of reports: one writer, one stylesheet, and the parts that pages share."""
