"""Models served over HTTP in the formats of OpenAI's API.

computing   the thread that computes for all requests, and its queue
requests    bodies of requests, with bounds on every number
answers     bodies of answers
entries     bytes and log-probabilities of the tokens of a text
guard       access: hosts, origins, tokens, limits
app         routes
server      `gf.serve`: loads models, opens a port, shuts down in order
"""
