"""Proofs of exactness: the same tokens as plain decoding, and the same distribution at a temperature above 0."""

from __future__ import annotations

from anabranch.certify.compare import Certificate, certify
from anabranch.certify.distribution import DRAFTER, Design, Finding, SamplingCertificate, certify_sampling
from anabranch.certify.page import html_page

__all__ = [
    "DRAFTER",
    "Certificate",
    "Design",
    "Finding",
    "SamplingCertificate",
    "certify",
    "certify_sampling",
    "html_page",
]
