"""The version of the package, which results files and saved folders name."""

VERSION = "0.1.0"
