"""Every limit on what the network may ask of us, in one place: name, unit, reason.

Checked before anything is allocated (invariant 8 of the design).
"""

MAX_CONTROL_BYTES = 1 << 20
"""One control message. The largest, a certified commit of 64 peers, is about 30 kB; gRPC's default is 4 MiB."""

MAX_FORWARD_BYTES = (MAX_CONTROL_BYTES >> 1) + (64 << 10)
"""A control message that another is asked to pass on: half as long as the longest, as a history is at most, and what it begins with."""

MAX_RECORD_BYTES = 16 << 10
"""One DHT record. Kademlia stores grow slow above a few kB; a manifest is about 2 kB."""

MAX_GROUP_PEERS = 64
"""Peers in one round. A butterfly of 64 keeps a part at 1/64 of the model and control traffic small."""

MAX_DIVISIONS = 16
"""Of the groups from which one has come: 65,536 of them are a million peers, in groups of 16."""

MAX_NEIGHBOURS = 256
"""Peers of other groups that one remembers: some of each of many groups, to meet one at a time."""

MAX_OWN_WORDS = MAX_NEIGHBOURS // 4
"""Of them, those of whom nothing but their own heartbeats tells: anybody who was invited can make keys, and groups for them."""

MAX_OUTER_ELEMENTS = 1 << 22
"""Outer parameters in one answer to another group: 8 MB in bf16, so that a few answers at a time take no memory that counts. Whoever wants more asks again."""

MAX_WAVES = 4
"""Parts of one round that one peer owns."""

MAX_PARTS = MAX_WAVES * MAX_GROUP_PEERS
"""Parts of one round."""

MAX_FRAGMENTS = 64
"""Fragments of a model; the published runs of Streaming DiLoCo have at most 36."""

MAX_PARAMETERS = 1 << 40
"""Parameters of a model: a trillion, far above what a swarm of volunteers can hold."""

MAX_INTERVALS = 4096
"""Sample intervals in one ledger; fragmentation beyond this is a bug or an attack."""

MAX_STEPS = 1 << 40
"""Of a pipeline: a step a second for 35,000 years. Higher numbers are nobody's step, and whoever believed one could soon not count on."""

MAX_LIFE = (1 << 31) - 1
"""Number of a stage's life. Who calls for another names a number that must be one itself."""

MAX_LIVES_AHEAD = 1 << 16
"""Lives of a stage of which a peer that has heard of none may not have heard; a wrong word of one peer cannot use up the numbers."""

MAX_IMPRINTS = 8
"""Activations of each side of a stage that a peer keeps for the case that the stage is lost."""

MAX_TEXT = 512
"""Characters of a free text (a reason, a device name) in a message."""

MAX_ADDRESSES = 16
"""Addresses one peer may announce."""

MAX_NAME = 64
"""Characters of a swarm's name."""

MAX_LABEL = 32
"""Characters of what a volunteer calls a region, or an owner."""

MAX_CLOCK_SKEW_S = 60.0
"""How far a sender's clock may be ahead of ours. NTP keeps machines within a second; laptops drift by minutes."""

MAX_BEAT_S = 60.0
"""From one heartbeat of a peer to the next. It is called dead after six of them."""

MAX_MESSAGE_LIFE_S = 120.0
"""How long a control message stays valid; longer lives make replay windows large."""

MAX_RECORD_LIFE_S = 3600.0
"""How long a peer record stays valid."""

REPLAY_WINDOW = 4096
"""Sequence numbers remembered per sender, as in IPsec's anti-replay window but wider: bulk of heartbeats."""

CHUNK_BYTES = 1 << 20
"""One chunk of outer state in a state transfer: large enough for full streams, small enough to resume."""

MAX_COMMITS_PER_REPLY = 64
"""Certified commits in one reply to a peer that catches up."""

MAX_REPLAY_SENDERS = 4096
"""Senders whose recent messages are remembered at once; about 0.7 kB each. 64 groups' worth."""

MAX_MANIFEST_BYTES = 8 << 10
"""One encoded manifest; ours are about 1 kB, and it must fit a record with room to spare."""

MAX_TOML_CHARS = 64 << 10
"""Characters of a person's manifest file; a full one has about 1,500."""

MAX_ADDRESS_CHARS = 256
"""Characters of one address. A relayed multiaddr with two peer ids has about 180, a DNS name up to 253."""

MAX_INVITATION_BYTES = 4096
"""Bytes in an invitation before base32; one address makes about 165."""

MAX_CLAIM_LIFE_S = 30 * 86400.0
"""How long a founder's claim to a name stays valid, so that peers can keep it alive while the founder is away."""

MAX_PROTOCOL_VERSIONS = 16
"""Versions one peer or manifest may list."""

MAX_WAYS = 32
"""Peers of which one word of a peer says how far away they are: half a kilobyte every other second."""

WAY_NAME_BYTES = 6
"""Of a peer's key there: enough to tell some thousand peers apart."""

LONGEST_TRIP_MS = 60_000
"""To a peer and back. What takes longer says nothing about the way."""

MAX_LOSS = 1e6
"""Nats per token. A uniform guess among all words of the largest vocabularies is 13."""

MAX_HOPS = 64
"""Hops of one route. Digests of real systems have 4 to 24 stages; interleaving multiplies them."""

MAX_PIPELINE_PEERS = 1024
"""Peers of all stages in the plan of one step: 16 stages of 64."""

MAX_MICROBATCHES = 1 << 16
"""Microbatches of one pipeline step; a step of a thousand is large."""
