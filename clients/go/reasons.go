package penstock

// Reason says why Penstock refused or ended a call. The constants below are errors, for errors.Is:
//
//	if errors.Is(err, penstock.ErrQueueFull) { ... }
//
// docs/reference/errors.md says of each when it comes and what to do. A newer server may have others.
type Reason string

// Error gives the reason itself.
func (r Reason) Error() string { return string(r) }

// The reasons of the contract.
const (
	// ErrInvalidField: fields are missing or out of range; Error.Violations has all of them.
	ErrInvalidField Reason = "INVALID_FIELD"
	// ErrPromptTooLong: the prompt leaves no room in the context.
	ErrPromptTooLong Reason = "PROMPT_TOO_LONG"
	// ErrExceedsKVCapacity: the request would not fit the server's KV cache, even if it ran alone.
	ErrExceedsKVCapacity Reason = "EXCEEDS_KV_CAPACITY"
	// ErrResponseTooLarge: the reply would be larger than the server sends, or has become so.
	ErrResponseTooLarge Reason = "RESPONSE_TOO_LARGE"
	// ErrUnsupportedFeature: this server does not have a part of the contract that the request uses.
	ErrUnsupportedFeature Reason = "UNSUPPORTED_FEATURE"
	// ErrServedElsewhere: another address of the server does this.
	ErrServedElsewhere Reason = "SERVED_ELSEWHERE"
	// ErrDuplicateRequestID: the caller has an active request with this id.
	ErrDuplicateRequestID Reason = "DUPLICATE_REQUEST_ID"
	// ErrUnknownModel: the request names a model that is not served here.
	ErrUnknownModel Reason = "UNKNOWN_MODEL"
	// ErrUnknownAdapter: no adapter of this name is there.
	ErrUnknownAdapter Reason = "UNKNOWN_ADAPTER"
	// ErrAdapterFormat: the config or a tensor of an adapter is not what the model can have.
	ErrAdapterFormat Reason = "ADAPTER_FORMAT"
	// ErrAdapterExists: another adapter has this name.
	ErrAdapterExists Reason = "ADAPTER_EXISTS"
	// ErrTooManyAdapters: there is no room for one more adapter, or for one more that is pinned.
	ErrTooManyAdapters Reason = "TOO_MANY_ADAPTERS"
	// ErrInvalidTensors: tensors of an update do not fit the model; Error.TensorErrors has them.
	ErrInvalidTensors Reason = "INVALID_TENSORS"
	// ErrChecksumMismatch: tensors arrived with other bytes than announced; Error.TensorErrors has them.
	ErrChecksumMismatch Reason = "CHECKSUM_MISMATCH"
	// ErrGenerationChanged: other weights serve than the update expected.
	ErrGenerationChanged Reason = "GENERATION_CHANGED"
	// ErrUpdateUnderWay: another weight update is under way, or one is staged.
	ErrUpdateUnderWay Reason = "UPDATE_UNDER_WAY"
	// ErrRequestAborted: Abort, a pause or a weight update ended a request for embeddings or scores.
	ErrRequestAborted Reason = "REQUEST_ABORTED"
	// ErrProfileUnderWay: another profile is being recorded or written.
	ErrProfileUnderWay Reason = "PROFILE_UNDER_WAY"
	// ErrProfileFailed: the profile could not be recorded or written.
	ErrProfileFailed Reason = "PROFILE_FAILED"
	// ErrUnknownUpdate: no weight update with this id is staged or committed.
	ErrUnknownUpdate Reason = "UNKNOWN_UPDATE"
	// ErrWeightsTooOld: the weights in use are older than the request's min_weights.
	ErrWeightsTooOld Reason = "WEIGHTS_TOO_OLD"
	// ErrDrainTimeout: running requests took longer than drain_timeout; nothing has changed.
	ErrDrainTimeout Reason = "DRAIN_TIMEOUT"
	// ErrPaused: the change would wait for requests that a pause keeps.
	ErrPaused Reason = "PAUSED"
	// ErrPauseTakenBack: Resume came while the pause waited for running requests.
	ErrPauseTakenBack Reason = "PAUSE_TAKEN_BACK"
	// ErrUnknownService: a health check names a service that does not exist.
	ErrUnknownService Reason = "UNKNOWN_SERVICE"
	// ErrUnauthenticated: the key is missing, malformed, unknown or revoked.
	ErrUnauthenticated Reason = "UNAUTHENTICATED"
	// ErrKeyExpired: the key was valid until it expired.
	ErrKeyExpired Reason = "KEY_EXPIRED"
	// ErrForbidden: the key is valid, and does not allow this.
	ErrForbidden Reason = "FORBIDDEN"
	// ErrRateLimited: the key has used up its rate of requests or tokens.
	ErrRateLimited Reason = "RATE_LIMITED"
	// ErrQueueFull: too many requests wait.
	ErrQueueFull Reason = "QUEUE_FULL"
	// ErrBusy: a bound on what goes on at once is reached; Error.Metadata names it.
	ErrBusy Reason = "BUSY"
	// ErrCostlyGrammar: the grammar took the server too long a short while ago.
	ErrCostlyGrammar Reason = "COSTLY_GRAMMAR"
	// ErrMessageTooLarge: the request's message is larger than the server takes.
	ErrMessageTooLarge Reason = "MESSAGE_TOO_LARGE"
	// ErrStalledSender: the client sent nothing for longer than the server waits.
	ErrStalledSender Reason = "STALLED_SENDER"
	// ErrStalledReader: the client read nothing for longer than the server waits.
	ErrStalledReader Reason = "STALLED_READER"
	// ErrNotReady: the server is still loading or compiling.
	ErrNotReady Reason = "NOT_READY"
	// ErrDraining: the server is shutting down.
	ErrDraining Reason = "DRAINING"
	// ErrWeightsIncomplete: an update in place has failed halfway.
	ErrWeightsIncomplete Reason = "WEIGHTS_INCOMPLETE"
	// ErrEngineDead: the server's engine had died before the request came.
	ErrEngineDead Reason = "ENGINE_DEAD"
	// ErrGroupEnded: one of the processes over which the model is cut was lost; they start again.
	ErrGroupEnded Reason = "GROUP_ENDED"
	// ErrUnavailable: all processes that compile grammars are busy.
	ErrUnavailable Reason = "UNAVAILABLE"
	// ErrNonFiniteLogits: the model computed NaN or infinity for this request.
	ErrNonFiniteLogits Reason = "NON_FINITE_LOGITS"
	// ErrGenerationFailed: this request cannot go on; others go on.
	ErrGenerationFailed Reason = "GENERATION_FAILED"
	// ErrEngineFailure: the engine died while it had this request.
	ErrEngineFailure Reason = "ENGINE_FAILURE"
	// ErrInternal: the server has a bug.
	ErrInternal Reason = "INTERNAL"
)
