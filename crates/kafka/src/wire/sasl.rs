//! SASL: PLAIN and SCRAM (RFC 5802, without channel binding).

use std::num::NonZeroU32;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use kafka_protocol::error::ParseResponseErrorCode as _;
use kafka_protocol::messages::{SaslAuthenticateRequest, SaslHandshakeRequest};
use ring::rand::SecureRandom as _;
use ring::{digest, hmac, pbkdf2};

use super::{Connection, WireError, text};

/// A broker that asks for fewer iterations would make the password easy to guess.
const ITERATIONS_MIN: u32 = 4_096;
/// A broker that asks for more would stop this client for minutes.
const ITERATIONS_MAX: u32 = 1_000_000;

/// The mechanism of the authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaslMechanism {
    /// The password itself; use it over TLS only.
    Plain,
    /// A proof of the password, with SHA-256.
    ScramSha256,
    /// A proof of the password, with SHA-512.
    ScramSha512,
}

impl SaslMechanism {
    /// The mechanism's name in Kafka's configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha256 => "SCRAM-SHA-256",
            Self::ScramSha512 => "SCRAM-SHA-512",
        }
    }
}

/// Credentials. SCRAM passwords are used as they are, without SASLprep: keep to ASCII.
#[derive(Clone)]
pub struct Sasl {
    /// The mechanism.
    pub mechanism: SaslMechanism,
    /// The user.
    pub user: String,
    /// The password.
    pub password: String,
}

impl std::fmt::Debug for Sasl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sasl({} {})", self.mechanism.name(), self.user)
    }
}

/// Authenticates a new connection; its caller bounds the time.
pub(super) async fn authenticate(connection: &mut Connection, sasl: &Sasl) -> Result<(), WireError> {
    let request = SaslHandshakeRequest::default().with_mechanism(text(sasl.mechanism.name()));
    let (response, _) = connection.call(&request, 1).await?;
    if let Some(error) = response.error_code.err() {
        let offered: Vec<&str> = response.mechanisms.iter().map(|name| &**name).collect();
        return Err(rejected(
            connection,
            format!("{error}: {} is not among {}", sasl.mechanism.name(), offered.join(", ")),
        ));
    }
    if sasl.mechanism == SaslMechanism::Plain {
        let token = format!("\0{}\0{}", sasl.user, sasl.password);
        exchange(connection, token).await?;
        return Ok(());
    }
    let nonce = nonce().map_err(|reason| rejected(connection, reason))?;
    let scram = Scram::new(sasl, &nonce);
    let server_first = exchange(connection, scram.first()).await?;
    let (last, signature) = scram.last(&server_first).map_err(|reason| rejected(connection, reason))?;
    let server_last = exchange(connection, last).await?;
    if server_last.strip_prefix("v=") == Some(signature.as_str()) {
        Ok(())
    } else {
        Err(rejected(connection, "the broker does not know the password itself".to_owned()))
    }
}

fn rejected(connection: &Connection, reason: String) -> WireError {
    WireError::Authentication { address: connection.address().to_owned(), reason }
}

async fn exchange(connection: &mut Connection, token: String) -> Result<String, WireError> {
    let request = SaslAuthenticateRequest::default().with_auth_bytes(Bytes::from(token));
    let (response, _) = connection.call(&request, 2).await?;
    if let Some(error) = response.error_code.err() {
        let message = response.error_message.as_deref().unwrap_or_default();
        return Err(rejected(connection, format!("{error}: {message}")));
    }
    String::from_utf8(response.auth_bytes.to_vec())
        .map_err(|_| connection.invalid("a SASL token that is no text".to_owned()))
}

fn nonce() -> Result<String, String> {
    let mut bytes = [0; 24];
    ring::rand::SystemRandom::new().fill(&mut bytes).map_err(|_| "no random numbers".to_owned())?;
    Ok(BASE64.encode(bytes))
}

/// The client's side of one SCRAM exchange.
struct Scram<'a> {
    sasl: &'a Sasl,
    nonce: &'a str,
    hmac: hmac::Algorithm,
    pbkdf2: pbkdf2::Algorithm,
}

impl<'a> Scram<'a> {
    fn new(sasl: &'a Sasl, nonce: &'a str) -> Self {
        let (hmac, pbkdf2) = match sasl.mechanism {
            SaslMechanism::ScramSha512 => (hmac::HMAC_SHA512, pbkdf2::PBKDF2_HMAC_SHA512),
            _ => (hmac::HMAC_SHA256, pbkdf2::PBKDF2_HMAC_SHA256),
        };
        Self { sasl, nonce, hmac, pbkdf2 }
    }

    fn first_bare(&self) -> String {
        let user = self.sasl.user.replace('=', "=3D").replace(',', "=2C");
        format!("n={user},r={}", self.nonce)
    }

    fn first(&self) -> String {
        format!("n,,{}", self.first_bare())
    }

    /// The final message, and the signature that the broker must show.
    fn last(&self, server_first: &str) -> Result<(String, String), String> {
        let field = |name: &str| {
            let mut fields = server_first.split(',');
            fields
                .find_map(|field| field.strip_prefix(name))
                .ok_or_else(|| format!("no {name} from the broker"))
        };
        let (nonce, salt, iterations) = (field("r=")?, field("s=")?, field("i=")?);
        if !nonce.starts_with(self.nonce) || nonce.len() == self.nonce.len() {
            return Err("the broker did not extend the nonce".to_owned());
        }
        let salt = BASE64.decode(salt).map_err(|_| "the salt is no base64".to_owned())?;
        let iterations = iterations
            .parse()
            .ok()
            .filter(|count| (ITERATIONS_MIN..=ITERATIONS_MAX).contains(count))
            .and_then(NonZeroU32::new)
            .ok_or_else(|| {
                format!("{iterations} iterations; {ITERATIONS_MIN} to {ITERATIONS_MAX} are accepted")
            })?;
        let mut salted = vec![0; self.hmac.digest_algorithm().output_len()];
        pbkdf2::derive(self.pbkdf2, iterations, &salt, self.sasl.password.as_bytes(), &mut salted);
        let sign = |key: &[u8], message: &[u8]| hmac::sign(&hmac::Key::new(self.hmac, key), message);
        let client_key = sign(&salted, b"Client Key");
        let stored_key = digest::digest(self.hmac.digest_algorithm(), client_key.as_ref());
        let without_proof = format!("c=biws,r={nonce}");
        let message = format!("{},{server_first},{without_proof}", self.first_bare());
        let signature = sign(stored_key.as_ref(), message.as_bytes());
        let proof: Vec<u8> =
            client_key.as_ref().iter().zip(signature.as_ref()).map(|(key, mask)| key ^ mask).collect();
        let server_key = sign(&salted, b"Server Key");
        let server_signature = sign(server_key.as_ref(), message.as_bytes());
        Ok((format!("{without_proof},p={}", BASE64.encode(proof)), BASE64.encode(server_signature.as_ref())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pencil() -> Sasl {
        Sasl { mechanism: SaslMechanism::ScramSha256, user: "user".into(), password: "pencil".into() }
    }

    /// The example of RFC 7677.
    const NONCE: &str = "rOprNGfwEbeRWgbNEkqO";
    const SERVER_FIRST: &str =
        "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";

    #[test]
    fn scram_gives_the_proof_of_the_standards_example() {
        let sasl = pencil();
        let (last, signature) = Scram::new(&sasl, NONCE).last(SERVER_FIRST).unwrap();
        assert!(last.ends_with("p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="), "{last}");
        assert_eq!(signature, "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
    }

    #[test]
    fn scram_refuses_a_broker_that_weakens_it() {
        let sasl = pencil();
        let scram = Scram::new(&sasl, NONCE);
        for weak in [
            SERVER_FIRST.replace("4096", "1"),
            SERVER_FIRST.replace("4096", "4000000000"),
            SERVER_FIRST.replace("r=rOpr", "r=XOpr"),
            format!("r={NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"),
            "r=x".to_owned(),
        ] {
            assert!(scram.last(&weak).is_err(), "{weak}");
        }
    }
}
