//! The requests that can be called. (The codec's own trait exists only together with a broker's half of the codec.)

use kafka_protocol::messages::{
    AddOffsetsToTxnRequest, AddOffsetsToTxnResponse, AlterConfigsRequest, AlterConfigsResponse, ApiKey,
    ApiVersionsRequest, ApiVersionsResponse, ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse,
    CreateAclsRequest, CreateAclsResponse, CreatePartitionsRequest, CreatePartitionsResponse,
    CreateTopicsRequest, CreateTopicsResponse, DeleteTopicsRequest, DeleteTopicsResponse,
    DescribeConfigsRequest, DescribeConfigsResponse, DescribeGroupsRequest, DescribeGroupsResponse,
    DescribeProducersRequest, DescribeProducersResponse, DescribeTransactionsRequest,
    DescribeTransactionsResponse, EndTxnRequest, EndTxnResponse, FetchRequest, FetchResponse,
    FindCoordinatorRequest, FindCoordinatorResponse, InitProducerIdRequest, InitProducerIdResponse,
    ListGroupsRequest, ListGroupsResponse, ListOffsetsRequest, ListOffsetsResponse, ListTransactionsRequest,
    ListTransactionsResponse, MetadataRequest, MetadataResponse, OffsetCommitRequest, OffsetCommitResponse,
    OffsetFetchRequest, OffsetFetchResponse, ProduceRequest, ProduceResponse, SaslAuthenticateRequest,
    SaslAuthenticateResponse, SaslHandshakeRequest, SaslHandshakeResponse, TxnOffsetCommitRequest,
    TxnOffsetCommitResponse, UpdateFeaturesRequest, UpdateFeaturesResponse, WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
};
use kafka_protocol::protocol::{Decodable, Encodable, HeaderVersion, Message};

/// A request with its key and response.
pub trait Call: Message + Encodable + HeaderVersion {
    /// The request's number in the protocol.
    const KEY: i16;
    /// Its response.
    type Answer: Decodable + HeaderVersion;
}

macro_rules! calls {
    ($($request:ident => $response:ident as $key:ident),* $(,)?) => {
        $(impl Call for $request {
            const KEY: i16 = ApiKey::$key as i16;
            type Answer = $response;
        })*
    };
}

calls! {
    AddOffsetsToTxnRequest => AddOffsetsToTxnResponse as AddOffsetsToTxn,
    AlterConfigsRequest => AlterConfigsResponse as AlterConfigs,
    ApiVersionsRequest => ApiVersionsResponse as ApiVersions,
    ConsumerGroupDescribeRequest => ConsumerGroupDescribeResponse as ConsumerGroupDescribe,
    CreateAclsRequest => CreateAclsResponse as CreateAcls,
    CreatePartitionsRequest => CreatePartitionsResponse as CreatePartitions,
    CreateTopicsRequest => CreateTopicsResponse as CreateTopics,
    DeleteTopicsRequest => DeleteTopicsResponse as DeleteTopics,
    DescribeConfigsRequest => DescribeConfigsResponse as DescribeConfigs,
    DescribeGroupsRequest => DescribeGroupsResponse as DescribeGroups,
    DescribeProducersRequest => DescribeProducersResponse as DescribeProducers,
    DescribeTransactionsRequest => DescribeTransactionsResponse as DescribeTransactions,
    EndTxnRequest => EndTxnResponse as EndTxn,
    FetchRequest => FetchResponse as Fetch,
    FindCoordinatorRequest => FindCoordinatorResponse as FindCoordinator,
    InitProducerIdRequest => InitProducerIdResponse as InitProducerId,
    ListGroupsRequest => ListGroupsResponse as ListGroups,
    ListOffsetsRequest => ListOffsetsResponse as ListOffsets,
    ListTransactionsRequest => ListTransactionsResponse as ListTransactions,
    MetadataRequest => MetadataResponse as Metadata,
    OffsetCommitRequest => OffsetCommitResponse as OffsetCommit,
    OffsetFetchRequest => OffsetFetchResponse as OffsetFetch,
    ProduceRequest => ProduceResponse as Produce,
    SaslAuthenticateRequest => SaslAuthenticateResponse as SaslAuthenticate,
    SaslHandshakeRequest => SaslHandshakeResponse as SaslHandshake,
    TxnOffsetCommitRequest => TxnOffsetCommitResponse as TxnOffsetCommit,
    UpdateFeaturesRequest => UpdateFeaturesResponse as UpdateFeatures,
    WriteTxnMarkersRequest => WriteTxnMarkersResponse as WriteTxnMarkers,
}
