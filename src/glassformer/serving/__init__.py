"""Models served over HTTP in the formats of OpenAI's API.

computing   the one thread that computes, and the queue in front of it
requests    bodies of requests, with bounds on every number
answers     bodies of answers
entries     bytes and log-probabilities of the tokens of a text
guard       access: hosts, origins, tokens, limits
app         routes
server      the verb: loads models, opens a port, ends in order
"""
