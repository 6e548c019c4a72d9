"""The lab: makes clusters, trains on them, compares, predicts and reports. Needs the extra
`offbeat[lab]`.
"""
